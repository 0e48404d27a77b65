"""Numbers only: this subpackage imports neither torch nor lightning nor deepspeed."""
