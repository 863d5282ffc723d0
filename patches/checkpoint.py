"""Three defects of the distributed optimizer's checkpoints with torch's AdamW: without Transformer Engine and Apex.

They are there on every device. A small experiment looks for each in the installed megatron-core before it is mended.
"""

import functools
import importlib
from types import SimpleNamespace
from typing import Any

import torch
from mcore_dsa.patches.registry import Patch

MODULE = "megatron.core.optimizer.distrib_optimizer"
CLASS = f"{MODULE}:DistributedOptimizer"
OTHER_OPTIMIZER = "the optimizer is Transformer Engine's or Apex's"


def _optimizer_class() -> Any:
    return importlib.import_module(MODULE).DistributedOptimizer


def _has_fused_adam() -> bool:
    return bool(importlib.import_module(MODULE).HAVE_APEX_OR_TE)


def _specimen(*, stepped: bool) -> Any:
    """A DistributedOptimizer over two one-element parameters, with just what the three methods read."""
    parameters = [torch.nn.Parameter(torch.ones(1)) for _ in range(2)]
    specimen = object.__new__(_optimizer_class())
    inner = torch.optim.AdamW(parameters)
    if stepped:
        for parameter in parameters:
            inner.state[parameter] = {key: torch.ones(1) for key in ("exp_avg", "exp_avg_sq")}
            inner.state[parameter]["step"] = torch.tensor(1.0)
    vars(specimen).update(
        optimizer=inner,
        grad_scaler=None,
        ddp_config=SimpleNamespace(use_megatron_fsdp=False),
        config=SimpleNamespace(use_precision_aware_optimizer_no_fp8_or_ds_fp8=False, fp16=False, optimizer="adam"),
        model_param_group_index_map={parameter: (0, order) for order, parameter in enumerate(parameters)},
    )
    return specimen


def _skip_fresh() -> str | None:
    if _has_fused_adam():
        return OTHER_OPTIMIZER
    try:
        _specimen(stepped=False).state_dict()
    except AssertionError:
        return None
    return "mended upstream: an optimizer that has not stepped has a state dict"


def _skip_shared_step() -> str | None:
    if _has_fused_adam():
        return OTHER_OPTIMIZER
    specimen = _specimen(stepped=True)
    specimen.load_state_dict(specimen.state_dict())
    steps = {id(state["step"]) for state in specimen.optimizer.state.values()}
    return "mended upstream: each parameter has its own step after a load" if len(steps) == 2 else None


def _skip_step_key() -> str | None:
    if _has_fused_adam():
        return OTHER_OPTIMIZER
    specimen = _specimen(stepped=True)
    parameter = next(iter(specimen.model_param_group_index_map))
    loaded = {key: torch.zeros(1) for key in ("param", "exp_avg", "exp_avg_sq")}
    try:
        specimen._set_main_param_and_optimizer_states(parameter, loaded)
    except (KeyError, RuntimeError):  # no step among the loaded tensors; a leaf written in place
        return None
    return "mended upstream: loaded tensors are set without a step among them"


def _install_fresh() -> None:
    optimizer_class = _optimizer_class()
    original = optimizer_class.state_dict

    @functools.wraps(original)
    def state_dict(self: Any) -> Any:
        if not self.optimizer.state:
            # What AdamW allocates in its first step, allocated now: that step computes the same from it.
            for group in self.optimizer.param_groups:
                for parameter in group["params"]:
                    zeros = {key: torch.zeros_like(parameter.detach()) for key in self.optimizer_state_keys}
                    self.optimizer.state[parameter] = {"step": torch.tensor(0.0), **zeros}
        return original(self)

    optimizer_class.state_dict = state_dict


def _install_shared_step() -> None:
    optimizer_class = _optimizer_class()
    original = optimizer_class.load_state_dict

    @functools.wraps(original)
    def load_state_dict(self: Any, state_dict: Any) -> None:
        original(self, state_dict)
        if self.ddp_config.use_megatron_fsdp:
            return
        # One tensor was handed to all: AdamW would count every parameter's step on it.
        for state in self.optimizer.state.values():
            if "step" in state:
                state["step"] = state["step"].clone()

    optimizer_class.load_state_dict = load_state_dict


def _install_step_key() -> None:
    optimizer_class = _optimizer_class()
    original = optimizer_class._set_main_param_and_optimizer_states

    @functools.wraps(original)
    def set_main_param_and_optimizer_states(self: Any, model_param: torch.nn.Parameter, tensors: Any) -> None:
        # load_state_dict has set the step; None says that there is nothing to copy. In the format dp_reshardable a step
        # does come along: the one from before the load.
        with torch.no_grad():
            original(self, model_param, {**tensors, "step": None})

    optimizer_class._set_main_param_and_optimizer_states = set_main_param_and_optimizer_states


PATCHES = (
    Patch(
        "DistributedOptimizer.state_dict",
        (f"{CLASS}.state_dict", f"{CLASS}.optimizer_state_keys", f"{MODULE}:HAVE_APEX_OR_TE"),
        "an optimizer that has not stepped has no state dict, so nothing can be loaded into it",
        _install_fresh,
        _skip_fresh,
    ),
    Patch(
        "DistributedOptimizer.load_state_dict",
        (f"{CLASS}.load_state_dict", f"{MODULE}:HAVE_APEX_OR_TE"),
        "after a load all parameters share one step tensor and AdamW advances it once per parameter",
        _install_shared_step,
        _skip_shared_step,
    ),
    Patch(
        "DistributedOptimizer._set_main_param_and_optimizer_states",
        (f"{CLASS}._set_main_param_and_optimizer_states", f"{MODULE}:HAVE_APEX_OR_TE"),
        "KeyError 'step' while loading, and with dp_reshardable a leaf is written in place",
        _install_step_key,
        _skip_step_key,
    ),
)
