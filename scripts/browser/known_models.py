"""Records the models that the page in the browser knows by name: `docs/browser/models/NAME.pt2`, some KB each.

    pip install torch torchvision timm transformers
    python scripts/browser/known_models.py               # those that are not there
    python scripts/browser/known_models.py --again       # all
    python scripts/browser/known_models.py resnet50 gpt2 # some
    python scripts/browser/known_models.py --seconds=150 # begins none after so long

A file has a recording alone: what the code of the package does in each mode, no weights and no graph. Models of
transformers are those of the defaults of their configs, which are published models; they are recorded with labels, so
that the loss is their own.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
FOLDER = ROOT / "docs" / "browser" / "models"

TORCHVISION = """
alexnet convnext_base convnext_large convnext_small convnext_tiny deeplabv3_mobilenet_v3_large deeplabv3_resnet101
deeplabv3_resnet50 densenet121 densenet161 densenet169 densenet201 efficientnet_b0 efficientnet_b1 efficientnet_b2
efficientnet_b3 efficientnet_b4 efficientnet_b7 efficientnet_v2_l efficientnet_v2_m efficientnet_v2_s fcn_resnet101
fcn_resnet50 lraspp_mobilenet_v3_large maxvit_t mnasnet1_0 mobilenet_v2 mobilenet_v3_large mobilenet_v3_small
regnet_x_16gf regnet_x_1_6gf regnet_x_32gf regnet_x_3_2gf regnet_x_400mf regnet_x_800mf regnet_x_8gf regnet_y_16gf
regnet_y_1_6gf regnet_y_32gf regnet_y_3_2gf regnet_y_400mf regnet_y_800mf regnet_y_8gf resnet101 resnet152 resnet18
resnet34 resnet50 resnext101_32x8d resnext101_64x4d resnext50_32x4d shufflenet_v2_x1_0 shufflenet_v2_x2_0
squeezenet1_0 squeezenet1_1 swin_b swin_s swin_t swin_v2_b swin_v2_s swin_v2_t vgg11 vgg16 vgg16_bn vgg19 vgg19_bn
vit_b_16 vit_b_32 vit_h_14 vit_l_16 vit_l_32 wide_resnet101_2 wide_resnet50_2
""".split()
TIMM = """
beit_base_patch16_224 caformer_s18 cait_s24_224 coat_lite_small coatnet_0_rw_224 convformer_s18 convmixer_768_32
convnextv2_atto convnextv2_base convnextv2_nano convnextv2_tiny crossvit_15_240 cspdarknet53 cspresnext50 darknet53
davit_small davit_tiny deit3_base_patch16_224 deit3_small_patch16_224 deit_base_patch16_224 deit_small_patch16_224
deit_tiny_patch16_224 dla60 dm_nfnet_f0 dpn92 edgenext_small efficientformer_l1 efficientformerv2_s0
efficientnet_lite0 efficientvit_b0 efficientvit_b1 efficientvit_m0 ese_vovnet39b eva02_base_patch14_224
eva02_small_patch14_224 fastvit_sa12 fastvit_t8 fbnetc_100 focalnet_tiny_srf gcvit_tiny ghostnet_100 gmlp_s16_224
hgnetv2_b0 hiera_base_224 hiera_tiny_224 hrnet_w18 hrnet_w32 inception_next_tiny inception_resnet_v2 inception_v4
lcnet_100 levit_128 levit_256 mixer_b16_224 mixnet_m mobilenetv3_large_100 mobilenetv4_conv_medium
mobilenetv4_conv_small mobilenetv4_hybrid_medium mobileone_s0 mobilevit_s mobilevit_xs mobilevitv2_100 mvitv2_small
mvitv2_tiny nest_small nextvit_small nfnet_l0 pit_s_224 poolformer_s12 poolformerv2_s12 pvt_v2_b0 pvt_v2_b2
regnetx_032 regnety_016 regnety_032 repvgg_a2 repvit_m1 res2net50_26w_4s resmlp_12_224 resnest50d resnet50d resnetaa50
resnetrs50 resnetv2_50 rexnet_100 seresnet50 seresnext50_32x4d skresnet50 swin_base_patch4_window7_224
swin_large_patch4_window7_224 swinv2_base_window8_256 swinv2_tiny_window8_256 tf_efficientnet_b0 tf_efficientnetv2_m
tf_efficientnetv2_s tiny_vit_21m_224 tiny_vit_5m_224 twins_pcpvt_small twins_svt_small vit_base_patch14_dinov2
vit_base_patch16_224 vit_base_patch16_siglip_224 vit_base_patch32_224 vit_huge_patch14_224 vit_large_patch16_224
vit_small_patch14_dinov2 vit_small_patch16_224 vit_so400m_patch14_siglip_224 vit_tiny_patch16_224 volo_d1_224
xception41 xception65 xcit_small_12_p16_224
""".split()
# by the name of the published model that the defaults of a config describe: its type, and the class with a loss
TRANSFORMERS = {
    "albert-xxlarge": ("albert", "AlbertForMaskedLM"),
    "bart-large": ("bart", "BartForConditionalGeneration"),
    "bert-base": ("bert", "BertForMaskedLM"),
    "deberta-base": ("deberta", "DebertaForMaskedLM"),
    "dinov2-base": ("dinov2", "Dinov2ForImageClassification"),
    "distilbert": ("distilbert", "DistilBertForMaskedLM"),
    "electra-small": ("electra", "ElectraForMaskedLM"),
    "falcon-7b": ("falcon", "FalconForCausalLM"),
    "gemma-7b": ("gemma", "GemmaForCausalLM"),
    "gpt-j-6b": ("gptj", "GPTJForCausalLM"),
    "gpt-neo-1.3b": ("gpt_neo", "GPTNeoForCausalLM"),
    "gpt-neox-20b": ("gpt_neox", "GPTNeoXForCausalLM"),
    "gpt2": ("gpt2", "GPT2LMHeadModel"),
    "llama-7b": ("llama", "LlamaForCausalLM"),
    "mistral-7b": ("mistral", "MistralForCausalLM"),
    "mixtral-8x7b": ("mixtral", "MixtralForCausalLM"),
    "mobilebert": ("mobilebert", "MobileBertForMaskedLM"),
    "modernbert-base": ("modernbert", "ModernBertForMaskedLM"),
    "mpnet-base": ("mpnet", "MPNetForMaskedLM"),
    "olmo-7b": ("olmo", "OlmoForCausalLM"),
    "opt-125m": ("opt", "OPTForCausalLM"),
    "persimmon-8b": ("persimmon", "PersimmonForCausalLM"),
    "phi-1": ("phi", "PhiForCausalLM"),
    "phi-3-mini": ("phi3", "Phi3ForCausalLM"),
    "roberta-base": ("roberta", "RobertaForMaskedLM"),
    "t5-small": ("t5", "T5ForConditionalGeneration"),
    "vit-base": ("vit", "ViTForImageClassification"),
    "whisper-tiny": ("whisper", "WhisperForConditionalGeneration"),
    "xglm-564m": ("xglm", "XGLMForCausalLM"),
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
    from staticmem.recording import hub
    from staticmem.recording.architectures import document_of

    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.json"
        if name in TRANSFORMERS:
            kind, head = TRANSFORMERS[name]
            config.write_text(json.dumps({"model_type": kind, "architectures": [head]}))
        architecture = architecture_of(given.replace("CONFIG", str(config)))
        assert architecture is not None
        described = hub.describe(architecture) if architecture.package == "transformers" else None
        document, _ = document_of(architecture, None, described)
    return carried.archive_of(document)


def main() -> int:
    asked = [word for word in sys.argv[1:] if not word.startswith("-")]
    limits = [float(word.partition("=")[2]) for word in sys.argv[1:] if word.startswith("--seconds=")]
    end = time.monotonic() + min(limits, default=float("inf"))
    FOLDER.mkdir(parents=True, exist_ok=True)
    failed = 0
    for name, (_, given) in names().items():
        path = FOLDER / f"{name}.pt2"
        if (asked and name not in asked) or (path.exists() and not asked and "--again" not in sys.argv):
            continue
        if time.monotonic() > end:
            break
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
