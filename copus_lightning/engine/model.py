"""How a model is cut into stages and its matrices into shards, described once and for every layout.

For Hugging Face decoders the description comes from the model's own plans: ``base_model_pp_plan`` says what
comes before, in and after the layers, ``base_model_tp_plan`` and ``_tp_plan`` how each matrix is cut. A stage is
the model itself, with everything it does not own made pass-through and re-entered with ``inputs_embeds``, so
what is special to a family (rotary tables, masks, sliding windows) stays upstream.
"""

from __future__ import annotations

import copy
import fnmatch
import hashlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from copus_lightning.core.layout import Layout, ModelShape
from copus_lightning.engine import layers
from copus_lightning.engine.groups import LayoutGroups
from copus_lightning.engine.state import LogicalTensor, StateMap

COLUMN, ROW, SUMMED, VOCABULARY = "colwise", "rowwise", "replicated_with_grad_allreduce", "vocabulary"


class PassThrough(nn.Module):
    """Stands where a stage owns nothing: returns its first argument."""

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return hidden_states


class Stage(nn.Module):
    """One pipeline stage: the model itself, of which this rank owns some layers and their shards.

    Attributes:
        extras: Keyword arguments of the current micro-batch (attention mask, position ids), which every stage
            reads from its own copy of the batch instead of receiving them from the stage before.
    """

    def __init__(self, model: nn.Module, base_name: str, first: bool, last: bool) -> None:
        super().__init__()
        self.model, self.base_name = model, base_name
        self.first, self.last = first, last
        self.extras: dict[str, torch.Tensor] = {}

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """``(samples, tokens)`` ids or ``(samples, tokens, hidden)`` activations to activations or logits."""
        entry = "input_ids" if self.first else "inputs_embeds"
        whole_or_base = self.model if self.last else self.base
        outputs = whole_or_base(**{entry: inputs}, use_cache=False, **self.extras)
        return outputs.logits if self.last else outputs.last_hidden_state

    @property
    def base(self) -> nn.Module:
        """The model without its head."""
        return getattr(self.model, self.base_name)  # type: ignore[no-any-return]

    def logical_parameters(self, tied: dict[str, str]) -> dict[str, nn.Parameter]:
        """Parameters of this stage by the name that they have in the whole model."""
        return {tied.get(name, name): p for name, p in self.model.named_parameters()}


class ModelDescription:
    """A causal language model of Hugging Face, independent of any layout.

    With :meth:`take_weights` the model becomes the skeleton: its parameters move to ``meta`` and its initial
    weights are handed out once, by :meth:`initial_weight`, so that no rank keeps the whole model.

    Args:
        model: A ``PreTrainedModel`` with a language-model head, with real weights or built on ``meta``.
        seed: Seeds the weights of a model built on ``meta``.

    Attributes:
        tensors: Every parameter: name, shape, how it is cut, and where it lives.
        tied: Names under which a parameter appears a second time, to its first name.

    Raises:
        ValueError: The model has no pipeline plan, layers or head, has dropout, or a part that no rule covers.
    """

    def __init__(self, model: Any, seed: int = 0) -> None:
        config: Any = getattr(model, "config", None)
        plan = getattr(config, "base_model_pp_plan", None)
        if config is None or not plan:
            raise ValueError(
                f"{type(model).__name__} has no pipeline plan (config.base_model_pp_plan): only Hugging Face "
                "decoders that publish one can be trained with CopusStrategy"
            )
        for name, module in model.named_modules():
            if isinstance(module, nn.Dropout) and module.p > 0:
                raise ValueError(
                    f"{name} is a dropout of {module.p}: ranks that hold the same activations would drop different "
                    "ones of them after a change of layout; set it to 0 in the model's config"
                )
        self.config, self.seed = config, seed
        self.skeleton: Any = model
        self.base_name: str = model.base_model_prefix
        base = getattr(model, self.base_name, None)
        head = model.get_output_embeddings()
        self.layers_name = next((n for n in plan if isinstance(getattr(base, n, None), nn.ModuleList)), "")
        self.head_name = next((n for n, m in model.named_children() if m is head and n != self.base_name), "")
        if not (self.layers_name and self.head_name):
            missing = (
                "language-model head" if self.layers_name else "list of layers that its pipeline plan names"
            )
            raise ValueError(
                f"{type(model).__name__} has no {missing}: CopusStrategy trains causal language models, as "
                "AutoModelForCausalLM makes them"
            )
        order = list(plan)
        cut = order.index(self.layers_name)
        self._before, self._after = order[:cut], order[cut + 1 :]
        self.n_layers = len(getattr(base, self.layers_name))
        self.tied = self._tied_names(model)
        self.styles = self._styles(model)
        self.tensors = self._tensors(model)
        self._buffers = list(self._rebuilt_buffers(model))
        self._weights: dict[str, torch.Tensor] = {}

    @property
    def shape(self) -> ModelShape:
        """What a layout must fit: layers, heads and vocabulary."""
        c = self.config
        heads = c.num_attention_heads
        return ModelShape(
            n_layers=self.n_layers,
            n_heads=heads,
            n_kv_heads=getattr(c, "num_key_value_heads", None) or heads,
            vocab_size=c.vocab_size,
            hidden_size=c.hidden_size,
            intermediate_size=getattr(c, "intermediate_size", None) or 4 * c.hidden_size,
        )

    def fingerprint(self) -> dict[str, Any]:
        """What must agree for a throughput profile to speak of this model."""
        s = self.shape
        names = ("n_layers", "n_heads", "n_kv_heads", "vocab_size", "hidden_size", "intermediate_size")
        n_parameters = sum(torch.Size(t.shape).numel() for t in self.tensors)
        fields = {name: getattr(s, name) for name in names}
        return {"model_type": self.config.model_type, **fields, "n_parameters": n_parameters}

    def state_map(self, zero_stage: int, groups: dict[str, int]) -> StateMap:
        """The geometry of masters and moments, given each parameter's optimizer group."""
        from dataclasses import replace

        tensors = tuple(replace(t, group=groups[t.name]) for t in self.tensors if t.name in groups)
        return StateMap(tensors=tensors, n_layers=self.n_layers, zero_stage=zero_stage)

    # -- description -------------------------------------------------------------------------------------------

    @staticmethod
    def _tied_names(model: nn.Module) -> dict[str, str]:
        first: dict[int, str] = {}
        tied = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if first.setdefault(id(parameter), name) != name:
                tied[name] = first[id(parameter)]
        return tied

    def _styles(self, model: Any) -> dict[str, str]:
        """Module name to the way its matrix is cut; modules that are not named are replicated."""
        rules = {f"{self.base_name}.{k}": v for k, v in (self.config.base_model_tp_plan or {}).items()}
        embedding = next(n for n, m in model.named_modules() if m is model.get_input_embeddings())
        for name, wanted in ((embedding, nn.Embedding), (self.head_name, nn.Linear)):
            module = model.get_submodule(name)
            scaled = wanted is nn.Embedding and isinstance(getattr(module, "embed_scale", None), torch.Tensor)
            if type(module).forward is not wanted.forward and not scaled:
                raise ValueError(
                    f"{name} is a {type(module).__name__} with a forward pass of its own, and cannot be cut over "
                    "tensor ranks"
                )
        styles = {embedding: VOCABULARY, self.head_name: VOCABULARY}
        for name, module in model.named_modules():
            for pattern, style in rules.items():
                if name not in styles and fnmatch.fnmatchcase(name, pattern):
                    cut = style in (COLUMN, ROW) and type(module).forward is nn.Linear.forward
                    if not cut and style != SUMMED:
                        raise ValueError(
                            f"{name}, a {type(module).__name__}, is cut by the rule {style!r}, which is not "
                            f"supported: supported are {COLUMN} and {ROW} linear layers, and {SUMMED}"
                        )
                    styles[name] = style
        return styles

    def _tensors(self, model: nn.Module) -> tuple[LogicalTensor, ...]:
        prefix = f"{self.base_name}.{self.layers_name}."
        tied_to = set(self.tied.values())
        tensors = []
        for name, parameter in model.named_parameters():
            module, _, leaf = name.rpartition(".")
            style = self.styles.get(module)
            shard_dim = {COLUMN: 0, VOCABULARY: 0, ROW: 1}.get(style or "")
            if style == ROW and leaf == "bias":
                shard_dim = None
            layer = int(name[len(prefix) :].split(".")[0]) if name.startswith(prefix) else None
            in_base = name.startswith(f"{self.base_name}.")
            owner = name.split(".")[1] if in_base else self.head_name
            tensors.append(
                LogicalTensor(
                    name=name,
                    shape=tuple(parameter.shape),
                    shard_dim=shard_dim,
                    layer=layer,
                    on_first=layer is None and in_base and owner in self._before,
                    on_last=layer is None and (not in_base or owner in self._after or name in tied_to),
                    group=0,
                )
            )
            last = tensors[-1]
            if layer is None and not (last.on_first or last.on_last):
                raise ValueError(
                    f"parameter {name} is in no stage of {self.config.model_type}'s pipeline plan"
                )
        return tuple(tensors)

    # -- weights -----------------------------------------------------------------------------------------------

    def take_weights(self) -> None:
        """Moves the model's parameters to ``meta``, and keeps their values until they are handed out.

        A step of its own, so that a model that turns out not to fit its layout is left as it was.
        """
        self._dtype = next(self.skeleton.parameters()).dtype
        replaced: dict[int, nn.Parameter] = {}
        for module_name, module in self.skeleton.named_modules():
            for leaf, parameter in list(module.named_parameters(recurse=False)):
                if id(parameter) not in replaced:
                    name = f"{module_name}.{leaf}" if module_name else leaf
                    if not parameter.is_meta:
                        self._weights[name] = parameter.detach()
                    meta = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
                    replaced[id(parameter)] = meta
                setattr(module, leaf, replaced[id(parameter)])
        for name, leaf, buffer in self._buffers:
            setattr(self.skeleton.get_submodule(name), leaf, buffer)

    def _rebuilt_buffers(self, model: nn.Module) -> Iterator[tuple[str, str, torch.Tensor]]:
        """What the buffers that were built on ``meta`` hold (such as rotary frequencies): module, name, values."""
        for name, module in model.named_modules():
            if not any(buffer.is_meta for buffer in module.buffers(recurse=False)):
                continue
            if hasattr(module, "scalar_embed_scale"):  # of scaled embeddings
                yield name, "embed_scale", torch.tensor(module.scalar_embed_scale)
                continue
            try:
                with torch.device("cpu"):
                    fresh = type(module)(self.config)  # type: ignore[call-arg]
            except Exception as error:
                raise ValueError(
                    f"the buffers of {name} cannot be rebuilt from the config ({' '.join(str(error).split())}): "
                    "build the model on a real device instead of meta"
                ) from None
            for leaf, buffer in fresh.named_buffers(recurse=False):
                yield name, leaf, buffer

    def initial_weight(self, tensor: LogicalTensor) -> torch.Tensor:
        """The whole initial value of one parameter, in fp32 on the CPU. Handed out once, then forgotten.

        A model built on ``meta`` is initialised here, module by module, from the seed and the module's name, so
        that the values do not depend on the layout.
        """
        if tensor.name in self._weights:
            return self._weights[tensor.name].to(device="cpu", dtype=torch.float32)
        name, _, leaf = tensor.name.rpartition(".")
        module = copy.deepcopy(self.skeleton.get_submodule(name)).to_empty(device="cpu").float()
        digest = hashlib.sha256(f"{self.seed}/{name}".encode()).digest()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int.from_bytes(digest[:8], "big") % 2**63)
            self.skeleton._init_weights(module)
        return getattr(module, leaf).detach()

    def forget_weights(self) -> None:
        """Frees the initial weights."""
        self._weights.clear()

    @property
    def initial_weights(self) -> dict[str, torch.Tensor]:
        """The weights that came with the model, by name; empty if it was built on ``meta``."""
        return self._weights

    # -- stages ------------------------------------------------------------------------------------------------

    def build_stage(self, state_map: StateMap, groups: LayoutGroups, rank: int) -> Stage:
        """The stage that ``rank`` owns under the groups' layout, with parameters of its shards' sizes on ``meta``.

        Makes no collective call.
        """
        layout = groups.layout
        at = layout.coordinates(rank)
        first, last = at.pipeline == 0, at.pipeline == layout.pipeline - 1
        start, stop = state_map.layer_range(layout, at.pipeline)
        base = getattr(self.skeleton, self.base_name)
        foreign = [m for i, m in enumerate(getattr(base, self.layers_name)) if not start <= i < stop]
        if not first:
            foreign += [getattr(base, n) for n in self._before]
        if not last:
            foreign += [getattr(base, n) for n in self._after]
            foreign.append(getattr(self.skeleton, self.head_name))
        model = copy.deepcopy(self.skeleton, {id(m): PassThrough() for m in foreign})
        if layout.tensor > 1:
            self._shard(model, layout, groups, at.tensor)
        return Stage(model, self.base_name, first, last)

    def _shard(self, model: nn.Module, layout: Layout, groups: LayoutGroups, tensor_rank: int) -> None:
        by_name = {t.name: t for t in self.tensors}
        embedding: nn.Module | None = None
        present = dict(model.named_modules())
        for name, style in self.styles.items():
            module: Any = present.get(name)
            if module is None or isinstance(module, PassThrough):
                continue
            parent, _, leaf = name.rpartition(".")
            if style == SUMMED:
                setattr(model.get_submodule(parent), leaf, layers.SummedGradient(module, groups.tensor))
                continue
            tensor = by_name[self.tied.get(f"{name}.weight", f"{name}.weight")]
            bounds = [tensor.shard_bounds(layout.tensor, r) for r in range(layout.tensor)]
            widths = tuple(b - a for a, b in bounds)
            if embedding is not None and module.weight is embedding.weight_before_cut:  # tied in one stage
                module.weight = embedding.weight
            else:
                before = module.weight
                layers.shrink(module, "weight", bounds[tensor_rank], 1 if style == ROW else 0)
                if style != ROW and getattr(module, "bias", None) is not None:
                    layers.shrink(module, "bias", bounds[tensor_rank], 0)
            if isinstance(module, nn.Embedding):
                cut: nn.Module = layers.VocabRowParallelEmbedding(module, groups.tensor, widths)
                embedding = cut
                object.__setattr__(cut, "weight_before_cut", before)
            elif style == VOCABULARY:
                cut = layers.VocabColumnParallelLinear(module, groups.tensor, widths)
            elif style == COLUMN:
                cut = layers.ColumnParallelLinear(module, groups.tensor, widths)
            else:
                cut = layers.RowParallelLinear(module, groups.tensor, widths)
            setattr(model.get_submodule(parent), leaf, cut)
        if embedding is not None:
            object.__delattr__(embedding, "weight_before_cut")
