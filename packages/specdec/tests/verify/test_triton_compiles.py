"""The Triton kernels compile to machine code for each kind of GPU, on a machine without one."""

from __future__ import annotations

import os

import pytest

pytest.importorskip("torch")
triton = pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

GPUTarget = pytest.importorskip("triton.backends.compiler").GPUTarget
ASTSource = pytest.importorskip("triton.compiler").ASTSource
chain = pytest.importorskip("lamella.specdec.verify.triton.chain")
one_hot = pytest.importorskip("lamella.specdec.verify.triton.one_hot")

TARGETS = {
    "sm_80": (GPUTarget("cuda", 80, 32), "cubin"),
    "sm_90": (GPUTarget("cuda", 90, 32), "cubin"),
    "sm_100": (GPUTarget("cuda", 100, 32), "cubin"),
    "gfx942": (GPUTarget("hip", "gfx942", 64), "hsaco"),
    "gfx950": (GPUTarget("hip", "gfx950", 64), "hsaco"),
    "gfx1100": (GPUTarget("hip", "gfx1100", 32), "hsaco"),
}
POINTERS = {
    "probs": "*fp32",
    "draft_probs": "*bf16",
    "drafts": "*i32",
    "logits_start": "*i32",
    "accept_uniforms": "*fp64",
    "next_uniforms": "*fp64",
    "masses": "*fp64",
    "weights": "*fp64",
    "kept_weight": "*fp64",
    "excess": "*fp64",
    "residual": "*fp64",
    "num_drafts": "*i32",
    "num_accepted": "*i32",
    "next_ids": "*i32",
    "target_ids": "*i32",
    "uniforms": "*fp64",
    "rates": "*fp64",
}
KERNELS = {
    "mass": (chain._mass_kernel, {"BLOCK": chain.BLOCK}),
    "weigh": (chain._weigh_kernel, {"ONE_HOT": False, "BY_BLOCK": False, "BLOCKS": 128}),
    "weigh by block": (chain._weigh_kernel, {"ONE_HOT": True, "BY_BLOCK": True, "BLOCKS": 128}),
    "excess": (chain._excess_kernel, {"ONE_HOT": False, "BLOCK": chain.BLOCK, "BLOCKS": 128}),
    "decide": (chain._decide_kernel, {"BLOCKS": 128}),
    "residual": (chain._residual_kernel, {"ONE_HOT": False, "BLOCK": chain.BLOCK, "BLOCKS": 128}),
    "pick": (chain._pick_kernel, {"ONE_HOT": True, "BLOCK": chain.BLOCK, "BLOCKS": 128}),
    "one-hot": (one_hot._compare, {"BY_RATES": False, "WIDTH": 8}),
    "synthetic": (one_hot._compare, {"BY_RATES": True, "WIDTH": 8}),
}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_it_compiles(kernel, target, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    function, constants = KERNELS[kernel]
    gpu, binary = TARGETS[target]
    signature = {name: "constexpr" if name in constants else POINTERS.get(name, "i32") for name in function.arg_names}
    if "BY_RATES" in constants and not constants["BY_RATES"]:
        signature |= {"uniforms": "*i32", "rates": "*i32"}
    source = ASTSource(function, signature, {(function.arg_names.index(n),): v for n, v in constants.items()})
    assert len(triton.compile(source, target=gpu, options={"num_warps": 4, **chain.UNFUSED}).asm[binary]) > 500
