"""DeepSpeed and torch: one layout alive at a time, measured, switched and saved. No Lightning here."""
