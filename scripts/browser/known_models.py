"""Records the models that the page in the browser knows by name: `docs/browser/models/NAME.pt2`, some KB each.

    pip install torch torchvision timm transformers
    python scripts/browser/known_models.py               # those that are not there
    python scripts/browser/known_models.py --again       # all
    python scripts/browser/known_models.py resnet50 gpt2 # some

A file has a recording alone: what the code of the package does in each mode, no weights and no graph. Models of
transformers are those of the defaults of their configs, which are published models; they are recorded with labels, so
that the loss is their own.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
FOLDER = ROOT / "docs" / "browser" / "models"

TORCHVISION = """
alexnet convnext_base convnext_large convnext_small convnext_tiny deeplabv3_resnet50 densenet121 densenet169 densenet201
efficientnet_b0 efficientnet_b1 efficientnet_b2 efficientnet_b3 efficientnet_b4 efficientnet_b7 efficientnet_v2_m
efficientnet_v2_s fcn_resnet50 lraspp_mobilenet_v3_large maxvit_t mnasnet1_0 mobilenet_v2 mobilenet_v3_large
mobilenet_v3_small regnet_x_8gf regnet_y_16gf regnet_y_400mf regnet_y_8gf resnet101 resnet152 resnet18 resnet34 resnet50
resnext101_32x8d resnext50_32x4d shufflenet_v2_x1_0 squeezenet1_0 swin_b swin_s swin_t swin_v2_t vgg11 vgg16 vgg19
vit_b_16 vit_b_32 vit_l_16 wide_resnet50_2
""".split()
TIMM = """
beit_base_patch16_224 cait_s24_224 coatnet_0_rw_224 convnextv2_tiny deit_small_patch16_224 edgenext_small
efficientvit_b1 eva02_small_patch14_224 ghostnet_100 hrnet_w18 levit_256 mixer_b16_224 mobilenetv4_conv_small
mobilevit_s mobilevitv2_100 nfnet_l0 poolformer_s12 regnety_016 res2net50_26w_4s resnest50d resnetv2_50
swinv2_tiny_window8_256 tf_efficientnetv2_s vit_base_patch16_224 vit_large_patch16_224 vit_small_patch16_224
vit_tiny_patch16_224 xception41
""".split()
# by the name of the published model that the defaults of a config describe: its type, and the class with a loss
TRANSFORMERS = {
    "bert-base": ("bert", "BertForMaskedLM"),
    "distilbert": ("distilbert", "DistilBertForMaskedLM"),
    "electra-small": ("electra", "ElectraForMaskedLM"),
    "gpt2": ("gpt2", "GPT2LMHeadModel"),
    "llama-7b": ("llama", "LlamaForCausalLM"),
    "mistral-7b": ("mistral", "MistralForCausalLM"),
    "opt-125m": ("opt", "OPTForCausalLM"),
    "phi-1": ("phi", "PhiForCausalLM"),
    "t5-small": ("t5", "T5ForConditionalGeneration"),
    "vit-base": ("vit", "ViTForImageClassification"),
    "whisper-tiny": ("whisper", "WhisperForConditionalGeneration"),
}


def names() -> dict[str, tuple[str, str]]:
    """The group of each model, and what `analyze` takes in its place; a config has the place `CONFIG`."""
    found = {name: ("torchvision", f"torchvision:{name}") for name in TORCHVISION}
    found |= {f"timm-{name}": ("timm", f"timm:{name}") for name in TIMM}
    found |= {
        name: ("transformers", f"transformers:CONFIG,labels=yes,head={h}") for name, (_, h) in TRANSFORMERS.items()
    }
    return found


def recorded(name: str, given: str) -> bytes:
    """The bytes of a file with the recording of a model alone."""
    from staticmem.frontends import carried
    from staticmem.frontends.architectures import architecture_of
    from staticmem.recording.architectures import document_of

    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.json"
        if name in TRANSFORMERS:
            kind, head = TRANSFORMERS[name]
            config.write_text(json.dumps({"model_type": kind, "architectures": [head]}))
        architecture = architecture_of(given.replace("CONFIG", str(config)))
        assert architecture is not None
        document, _ = document_of(architecture, None)
    return carried.archive_of(document)


def main() -> int:
    asked = [word for word in sys.argv[1:] if not word.startswith("-")]
    FOLDER.mkdir(parents=True, exist_ok=True)
    failed = 0
    for name, (_, given) in names().items():
        path = FOLDER / f"{name}.pt2"
        if (asked and name not in asked) or (path.exists() and not asked and "--again" not in sys.argv):
            continue
        try:
            path.write_bytes(recorded(name, given))
        except Exception as error:
            failed += 1
            print(f"{name}: {type(error).__name__}: {str(error)[:200]}", flush=True)
        else:
            print(f"{name}: {path.stat().st_size:,} bytes", flush=True)
    rows = [{"name": name, "group": group} for name, (group, _) in names().items() if (FOLDER / f"{name}.pt2").exists()]
    (FOLDER / "models.json").write_text(json.dumps(rows, indent=0) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
