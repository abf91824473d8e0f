"""Words that trainers and other estimators have for options of staticmem, for the hint of an unknown flag or key."""

from __future__ import annotations

from collections.abc import Collection

from staticmem.errors import closest

# By the name here: the words that mean it elsewhere (transformers, DeepSpeed, Megatron, torchtitan, ultralytics).
# A word may mean several: the first that the asker knows is taken.
_WORDS: tuple[tuple[str, str], ...] = (
    ("batch", "batch-size bs train-batch-size per-device-train-batch-size micro-batch-size mbs"),
    ("dims", "seq seq-len seq-length sequence-length max-length max-seq-length context tokens length"),
    ("resolution", "image-size imgsz img-size input-size size height width"),
    ("optimizer", "train training optim opt"),
    ("mode", "inference infer eval generate generation"),
    ("amp", "bf16 fp16 mixed-precision autocast"),
    ("dtype", "half precision float16 bfloat16 torch-dtype"),
    ("checkpoint", "gradient-checkpointing activation-checkpointing recompute"),
    ("accumulate", "gradient-accumulation gradient-accumulation-steps grad-accum"),
    ("devices", "gpus num-gpus ngpus world-size nproc-per-node nodes"),
    ("parallel", "fsdp fsdp2 ddp zero zero-stage deepspeed tp tensor-parallel pp strategy"),
    ("context_parallel", "cp sequence-parallel ring"),
    ("expert_parallel", "ep"),
    ("quantize", "4bit 8bit load-in-4bit load-in-8bit int8 quant quantization bits"),
    ("lora", "peft adapter adapters rank lora-r qlora"),
    ("gpu", "card device gpu-memory vram memory-limit"),
    ("clip_grad_norm", "max-grad-norm clip-grad grad-clip"),
    ("sdpa", "attention attn attn-implementation flash-attn flash-attention"),
    ("torch_version", "torch pytorch pytorch-version"),
    ("max_memory", "budget limit"),
    ("gpu", "budget limit"),
    ("prices", "price cost max-price hourly"),
    ("format", "json csv markdown"),
    ("output", "out output-file save html"),
)
# What trainers have and the memory of a step does not depend on
_WITHOUT_EFFECT = "lr learning-rate epochs steps max-steps num-train-epochs seed warmup scheduler dataset data".split()
WITHOUT_EFFECT = "Leave it out: the memory of a step does not depend on it."


def meant_name(word: str, names: Collection[str]) -> str:
    """The name of an option that a word of another tool means; empty where none of `names` is meant."""
    for name, synonyms in _WORDS:
        if name in names and _hyphened(word) in synonyms.split():
            return name
    return ""


def hint_for(word: str, names: Collection[str]) -> str:
    """A hint for a name that is not known: what it means, or what is spelled alike; empty where nothing is."""
    meant = meant_name(word, names)
    if meant:
        return f"Did you mean '{meant}'?"
    if _hyphened(word) in _WITHOUT_EFFECT:
        return WITHOUT_EFFECT
    return closest(word.lower().replace("-", "_"), names)


def _hyphened(word: str) -> str:
    return word.lower().replace("_", "-")
