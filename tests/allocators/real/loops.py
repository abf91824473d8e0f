"""Training loops with several models, as people write them, run in PyTorch on a stub of CUDA; and each as a plan.

Everything but the kernels is PyTorch's own, as in `runs.py`, which says how to make the environment:

    STUB=/tmp/stub python tests/allocators/real/loops.py

The result is tests/data/allocator/loops.gz: what both meters had after every instant of `CASES`. A loss that joins
models is a function that the loop calls; the plan has a module whose forward is that function. Their recordings are
loops.zip, which `loops.py --modules` writes in the environment of the tests.
"""

from __future__ import annotations

import copy
import gc
import gzip
import io
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

HERE = Path(__file__).parent
TOTAL = 140 * 2**30
OPTIMIZERS = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
Modules = dict[str, "tuple[nn.Module, tuple[torch.Tensor, ...]]"]
Read = Callable[[], None]
Parts = dict[str, dict[str, str]]


def no_grad(function: Callable[..., None]) -> Callable[..., None]:
    """`@torch.no_grad()`, with its type."""
    decorated: Callable[..., None] = torch.no_grad()(function)
    return decorated


# ------------------------------------------------------------------------------------------------------- networks


class Images(nn.Module):  # type: ignore[misc]
    """A classifier of images."""

    def __init__(self, width: int, depth: int, classes: int = 100) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, 2, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(True))
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(width, width, 3, padding=1, bias=False),
                nn.BatchNorm2d(width),
                nn.ReLU(inplace=True),
                nn.Conv2d(width, width, 3, padding=1, bias=False),
                nn.BatchNorm2d(width),
            )
            for _ in range(depth)
        )
        self.head = nn.Linear(width, classes)

    def features(self, x: Any) -> Any:
        x = self.stem(x)
        for block in self.blocks:
            x = F.relu(x + block(x))
        return x

    def forward(self, x: Any) -> Any:
        return self.head(self.features(x).mean((2, 3)))


class Generator(nn.Module):  # type: ignore[misc]
    def __init__(self, width: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        wide = 100
        for out in (width * 8, width * 4, width * 2, width):
            layers += [nn.ConvTranspose2d(wide, out, 4, 2 if layers else 1, 1 if layers else 0, bias=False)]
            layers += [nn.BatchNorm2d(out), nn.ReLU(True)]
            wide = out
        self.main = nn.Sequential(*layers, nn.ConvTranspose2d(wide, 3, 4, 2, 1), nn.Tanh())

    def forward(self, z: Any) -> Any:
        return self.main(z[:, :, None, None])


class Discriminator(nn.Module):  # type: ignore[misc]
    def __init__(self, width: int) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(3, width, 4, 2, 1), nn.LeakyReLU(0.2, True)]
        for times in (1, 2, 4):
            layers += [nn.Conv2d(width * times, width * times * 2, 4, 2, 1, bias=False)]
            layers += [nn.BatchNorm2d(width * times * 2), nn.LeakyReLU(0.2, True)]
        self.main = nn.Sequential(*layers, nn.Conv2d(width * 8, 1, 4))

    def forward(self, x: Any) -> Any:
        return self.main(x).flatten()


class Translator(nn.Module):  # type: ignore[misc]
    """Images to images."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.down1, self.down2 = nn.Conv2d(3, width, 4, 2, 1), nn.Conv2d(width, width * 2, 4, 2, 1)
        self.norm = nn.InstanceNorm2d(width * 2)
        self.up2, self.up1 = nn.ConvTranspose2d(width * 2, width, 4, 2, 1), nn.ConvTranspose2d(width * 2, 3, 4, 2, 1)

    def forward(self, x: Any) -> Any:
        one = F.leaky_relu(self.down1(x), 0.2)
        two = self.norm(self.down2(one))
        up = F.relu(self.up2(F.relu(two)))
        return torch.tanh(self.up1(torch.cat((up, one), 1)))


class Block(nn.Module):  # type: ignore[misc]
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: Any) -> Any:
        batch, length, dim = x.shape
        qkv = self.qkv(self.ln1(x)).view(batch, length, 3, self.heads, dim // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, dim))
        return x + self.mlp(self.ln2(x))


class Trunk(nn.Module):  # type: ignore[misc]
    """A decoder without its head."""

    def __init__(self, dim: int, depth: int, vocabulary: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, dim)
        self.blocks = nn.ModuleList(Block(dim, dim // 64) for _ in range(depth))
        self.ln = nn.LayerNorm(dim)

    def forward(self, ids: Any) -> Any:
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        return self.ln(x)


class Headed(nn.Module):  # type: ignore[misc]
    """A trunk with a head: of tokens a language model, of one number a critic."""

    def __init__(self, trunk: nn.Module, dim: int, wide: int) -> None:
        super().__init__()
        self.trunk, self.head = trunk, nn.Linear(dim, wide, bias=False)

    def forward(self, ids: Any) -> Any:
        return self.head(self.trunk(ids))


def mlp(inputs: int, wide: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, wide), nn.ReLU(), nn.Linear(wide, wide), nn.ReLU(), nn.Linear(wide, outputs))


class Joint(nn.Module):  # type: ignore[misc]
    """Models that a function of them and of a batch joins."""

    def __init__(self, function: Callable[..., Any], **models: nn.Module) -> None:
        super().__init__()
        self.function, self.names = function, tuple(models)
        for name, model in models.items():
            setattr(self, name, model)

    def forward(self, *batch: Any) -> Any:
        return self.function(*(getattr(self, name) for name in self.names), *batch)


# --------------------------------------------------------------------------------------- functions that join models


def discriminator_loss(generator: Any, discriminator: Any, real: Any, z: Any) -> Any:
    with torch.no_grad():
        fake = generator(z)
    on_real, on_fake = discriminator(real), discriminator(fake)
    good = F.binary_cross_entropy_with_logits(on_real, torch.ones_like(on_real))
    return good + F.binary_cross_entropy_with_logits(on_fake, torch.zeros_like(on_fake))


def generator_loss(generator: Any, discriminator: Any, z: Any) -> Any:
    scores = discriminator(generator(z))
    return F.binary_cross_entropy_with_logits(scores, torch.ones_like(scores))


def critic_loss(generator: Any, critic: Any, real: Any, z: Any) -> Any:
    with torch.no_grad():
        fake = generator(z)
    return critic(fake).mean() - critic(real).mean()


def wasserstein_loss(generator: Any, critic: Any, z: Any) -> Any:
    return -critic(generator(z)).mean()


def distillation_loss(student: Any, teacher: Any, x: Any, y: Any) -> Any:
    with torch.no_grad():
        wanted = teacher(x)
    scores = student(x)
    soft = F.kl_div(F.log_softmax(scores / 4, -1), F.softmax(wanted / 4, -1), reduction="batchmean") * 16
    return 0.5 * soft + 0.5 * F.cross_entropy(scores.flatten(0, -2), y.flatten())


def hint_loss(student: Any, teacher: Any, x: Any, y: Any) -> Any:
    with torch.no_grad():
        wanted = teacher.features(x)
    features = student.features(x)
    hint = F.mse_loss(features, wanted)
    return hint + F.cross_entropy(student.head(features.mean((2, 3))), y)


def log_probabilities(model: Any, ids: Any) -> Any:
    scores = model(ids)[:, :-1].log_softmax(-1)
    return scores.gather(-1, ids[:, 1:, None]).squeeze(-1).sum(-1)


def dpo_loss(policy: Any, reference: Any, chosen: Any, rejected: Any) -> Any:
    better, worse = log_probabilities(policy, chosen), log_probabilities(policy, rejected)
    with torch.no_grad():
        better_before, worse_before = log_probabilities(reference, chosen), log_probabilities(reference, rejected)
    return -F.logsigmoid(0.1 * ((better - worse) - (better_before - worse_before))).mean()


def joined_dpo_loss(policy: Any, reference: Any, chosen: Any, rejected: Any) -> Any:
    ids = torch.cat((chosen, rejected))
    with torch.no_grad():
        before = log_probabilities(reference, ids)
    now = log_probabilities(policy, ids)
    count = chosen.shape[0]
    return -F.logsigmoid(0.1 * ((now[:count] - now[count:]) - (before[:count] - before[count:]))).mean()


def reward_loss(reward: Any, chosen: Any, rejected: Any) -> Any:
    return -F.logsigmoid(reward(chosen)[:, -1, 0] - reward(rejected)[:, -1, 0]).mean()


def consistency_loss(student: Any, teacher: Any, x: Any, y: Any) -> Any:
    scores = student(x)
    with torch.no_grad():
        wanted = teacher(x).softmax(-1)
    return F.cross_entropy(scores, y) + F.mse_loss(scores.softmax(-1), wanted)


def byol_loss(online: Any, predictor: Any, target: Any, x: Any, other: Any) -> Any:
    one, two = predictor(online(x)), predictor(online(other))
    with torch.no_grad():
        to_one, to_two = target(other), target(x)
    return 4 - 2 * F.cosine_similarity(one, to_one).mean() - 2 * F.cosine_similarity(two, to_two).mean()


def rollout(actor: Any, critic: Any, reference: Any, ids: Any) -> Any:
    return log_probabilities(actor, ids), critic(ids).squeeze(-1), log_probabilities(reference, ids)


def ppo_loss(actor: Any, critic: Any, ids: Any, before: Any, advantages: Any, returns: Any) -> Any:
    ratio = (log_probabilities(actor, ids) - before).exp()
    gain = torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    values = critic(ids).squeeze(-1)
    return -gain.mean() + 0.5 * F.mse_loss(values, returns)


def q_loss(q1: Any, q2: Any, target1: Any, target2: Any, actor: Any, s: Any, a: Any, r: Any, after: Any) -> Any:
    with torch.no_grad():
        following = torch.cat((after, torch.tanh(actor(after))), 1)
        wanted = r + 0.99 * torch.min(target1(following), target2(following))
    both = torch.cat((s, a), 1)
    return F.mse_loss(q1(both), wanted) + F.mse_loss(q2(both), wanted)


def actor_loss(actor: Any, q1: Any, q2: Any, s: Any) -> Any:
    both = torch.cat((s, torch.tanh(actor(s))), 1)
    return -torch.min(q1(both), q2(both)).mean()


def perceptual_loss(translator: Any, judge: Any, x: Any, wanted: Any) -> Any:
    made = translator(x)
    with torch.no_grad():
        features = judge.features(wanted)
    return F.l1_loss(made, wanted) + F.mse_loss(judge.features(made), features)


def cycle_loss(there: Any, back: Any, judge_a: Any, judge_b: Any, a: Any, b: Any) -> Any:
    fake_b, fake_a = there(a), back(b)
    on_b, on_a = judge_b(fake_b), judge_a(fake_a)
    adversarial = F.mse_loss(on_b, torch.ones_like(on_b)) + F.mse_loss(on_a, torch.ones_like(on_a))
    return adversarial + 10 * (F.l1_loss(back(fake_b), a) + F.l1_loss(there(fake_a), b))


def judges_loss(there: Any, back: Any, judge_a: Any, judge_b: Any, a: Any, b: Any) -> Any:
    with torch.no_grad():
        fake_b, fake_a = there(a), back(b)
    loss = 0
    for judge, real, fake in ((judge_a, a, fake_a), (judge_b, b, fake_b)):
        on_real, on_fake = judge(real), judge(fake)
        loss = loss + F.mse_loss(on_real, torch.ones_like(on_real)) + F.mse_loss(on_fake, torch.zeros_like(on_fake))
    return loss


def contrastive_loss(images: Any, texts: Any, x: Any, ids: Any) -> Any:
    one = F.normalize(images(x), dim=-1)
    two = F.normalize(texts(ids).mean(1), dim=-1)
    scores = one @ two.t() * 14.3
    labels = torch.arange(x.shape[0], device=x.device)
    return (F.cross_entropy(scores, labels) + F.cross_entropy(scores.t(), labels)) / 2


# ---------------------------------------------------------------------------------------------------------- loops


def on_gpu(model: Any) -> Any:
    """As a model comes from its checkpoint: made on the CPU, then moved."""
    return model.to_empty(device="cpu").to("cuda")


class Loop:
    """A loop as PyTorch code (`run`), and as a plan (`instants`) over `modules`, of which some have parts."""

    parts: ClassVar[Parts] = {}

    def __init__(self, **sizes: Any) -> None:
        self.p = sizes
        self.optimizer = OPTIMIZERS[sizes.get("optimizer", "adamw")]

    def modules(self) -> Modules:
        raise NotImplementedError

    def instants(self) -> Iterator[dict[str, Any]]:
        raise NotImplementedError

    def run(self, read: Read) -> None:
        raise NotImplementedError

    def step(self, model: str, **more: Any) -> dict[str, Any]:
        """A step over a module that returns its loss."""
        loss = {"loss": "none", "optimizer": self.p.get("optimizer", "adamw"), "batch": self.p["batch"]}
        return {"step": {"model": model, "times": 1, **loss, **more}}


class Gan(Loop):
    """Steps of a discriminator, whose fakes have no history, then one of the generator through the frozen
    discriminator; and images at the end of each epoch."""

    def networks(self) -> tuple[nn.Module, nn.Module]:
        return Generator(self.p["width"]), Discriminator(self.p["width"])

    @property
    def losses(self) -> tuple[Any, Any]:
        if self.p.get("wasserstein"):
            return critic_loss, wasserstein_loss
        return discriminator_loss, generator_loss

    def modules(self) -> Modules:
        g, d = self.networks()
        of_d, of_g = self.losses
        real, z = torch.zeros(2, 3, 64, 64), torch.zeros(2, 100)
        return {
            "g": (g, (z,)),
            "d": (d, (real,)),
            "step_d": (Joint(of_d, g=g, d=d), (real, z)),
            "step_g": (Joint(of_g, g=g, d=d), (z,)),
        }

    parts: ClassVar[Parts] = {name: {"g": "g", "d": "d"} for name in ("step_d", "step_g")}

    def instants(self) -> Iterator[dict[str, Any]]:
        yield {"load": "g"}
        yield {"load": "d"}
        for _ in range(self.p["epochs"]):
            for _ in range(2):
                for _ in range(self.p.get("critics", 1)):
                    yield self.step("step_d")
                yield self.step("step_g", freeze="^d[.]")
            yield {"evaluate": {"model": "g", "batch": self.p["images"], "times": 2, "gather": self.p["gather"]}}

    def run(self, read: Read) -> None:
        batch = self.p["batch"]
        generator, discriminator = self.networks()
        of_d, of_g = self.losses
        generator = on_gpu(generator)
        read()
        discriminator = on_gpu(discriminator)
        read()
        optimizer_g = self.optimizer(generator.parameters(), 2e-4)
        optimizer_d = self.optimizer(discriminator.parameters(), 2e-4)
        real = z = z2 = None
        for _ in range(self.p["epochs"]):
            for _ in range(2):
                for _ in range(self.p.get("critics", 1)):
                    if real is None:
                        real, z = torch.empty(batch, 3, 64, 64).to("cuda"), torch.empty(batch, 100).to("cuda")
                    optimizer_d.zero_grad()
                    loss_d = of_d(generator, discriminator, real, z)
                    loss_d.backward()
                    optimizer_d.step()
                    read()
                if z2 is None:
                    z2 = torch.empty(batch, 100).to("cuda")
                discriminator.requires_grad_(False)
                optimizer_g.zero_grad()
                loss_g = of_g(generator, discriminator, z2)
                loss_g.backward()
                optimizer_g.step()
                discriminator.requires_grad_(True)
                read()
            self.sample(generator)
            read()

    def sample(self, generator: Any) -> None:
        images = []
        generator.eval()
        z = torch.empty(self.p["images"], 100).to("cuda")
        with torch.no_grad():
            for _ in range(2):
                made = generator(z)
                if self.p["gather"] == "list":
                    images.append(made)
                elif self.p["gather"] == "concat":
                    images = [made if not images else torch.cat((images[0], made))]
        generator.train()


class Distillation(Loop):
    """A student learns from a teacher; between epochs the student is evaluated."""

    def networks(self) -> tuple[nn.Module, nn.Module]:
        if "dim" in self.p:
            return self.decoder(self.p["dim"]), self.decoder(2 * self.p["dim"])
        return Images(self.p["width"], 2), Images(self.p.get("wide", 2 * self.p["width"]), 4)

    def decoder(self, dim: int) -> nn.Module:
        return Headed(Trunk(dim, 2, 1000), dim, 1000)

    def batch(self, count: int) -> tuple[torch.Tensor, ...]:
        if "dim" in self.p:
            ids = torch.zeros(count, self.p["length"], dtype=torch.int64)
            return ids, torch.zeros_like(ids)
        side = self.p["side"]
        return torch.empty(count, 3, side, side), torch.zeros(count, dtype=torch.int64)

    @property
    def loss(self) -> Any:
        return hint_loss if self.p.get("hints") else distillation_loss

    def modules(self) -> Modules:
        student, teacher = self.networks()
        batch = self.batch(2)
        return {
            "student": (student, batch[:1]),
            "teacher": (teacher, batch[:1]),
            "both": (Joint(self.loss, student=student, teacher=teacher), batch),
        }

    parts: ClassVar[Parts] = {"both": {"student": "student", "teacher": "teacher"}}

    def instants(self) -> Iterator[dict[str, Any]]:
        yield {"load": "student"}
        yield {"load": "teacher"}
        for _ in range(2):
            yield self.step("both", times=3)
            if self.p.get("save"):
                yield {"save": {"model": "student", "copies": "model", "stays": True}}
            yield {"evaluate": {"model": "student", "batch": self.p["test"], "times": 3, "gather": self.p["gather"]}}

    def run(self, read: Read) -> None:
        student, teacher = self.networks()
        student = on_gpu(student)
        read()
        teacher = on_gpu(teacher)
        read()
        optimizer = self.optimizer(student.parameters(), 1e-3)
        x, y = (one.to("cuda") for one in self.batch(self.p["batch"]))
        best = []
        for _ in range(2):
            for _ in range(3):
                optimizer.zero_grad()
                loss = self.loss(student, teacher, x, y)
                loss.backward()
                optimizer.step()
            read()
            if self.p.get("save"):
                best.append(copy.deepcopy(student.state_dict()))
                read()
            self.evaluate(student)
            read()

    @no_grad
    def evaluate(self, model: Any) -> None:
        model.eval()
        x = self.batch(self.p["test"])[0].to("cuda")
        outputs: list[Any] = []
        for _ in range(3):
            scores = model(x)
            if self.p["gather"] == "list":
                outputs.append(scores)
            elif self.p["gather"] == "concat":
                outputs = [scores if not outputs else torch.cat((outputs[0], scores))]
        model.train()


class Preferences(Loop):
    """DPO: a policy and its frozen reference, which may be evaluated beforehand."""

    def decoder(self) -> nn.Module:
        return Headed(Trunk(self.p["dim"], self.p["depth"], 2000), self.p["dim"], 2000)

    def ids(self, count: int) -> torch.Tensor:
        return torch.zeros(count, self.p["length"], dtype=torch.int64)

    @property
    def loss(self) -> Any:
        return joined_dpo_loss if self.p.get("joined") else dpo_loss

    def modules(self) -> Modules:
        policy, reference = self.decoder(), self.decoder()
        ids = self.ids(2)
        return {
            "policy": (policy, (ids,)),
            "reference": (reference, (ids,)),
            "dpo": (Joint(self.loss, policy=policy, reference=reference), (ids, ids)),
        }

    parts: ClassVar[Parts] = {"dpo": {"policy": "policy", "reference": "reference"}}

    def instants(self) -> Iterator[dict[str, Any]]:
        yield {"load": "policy"}
        yield {"copy": {"model": "reference", "of": "policy"}} if self.p.get("copied") else {"load": "reference"}
        yield self.step("dpo", times=2)
        yield {"evaluate": {"model": "policy", "batch": self.p["test"], "times": 2}}
        yield self.step("dpo", times=2)
        yield {"save": {"model": "policy", "copies": "all"}}
        yield {"end": "reference"} if self.p.get("ends") else "empty_cache"  # type: ignore[misc]

    def run(self, read: Read) -> None:
        policy = on_gpu(self.decoder())
        read()
        reference = copy.deepcopy(policy) if self.p.get("copied") else on_gpu(self.decoder())
        read()
        optimizer = self.optimizer(policy.parameters(), 1e-6)
        chosen, rejected = self.ids(self.p["batch"]).to("cuda"), self.ids(self.p["batch"]).to("cuda")
        for epoch in range(2):
            for _ in range(2):
                optimizer.zero_grad()
                loss = self.loss(policy, reference, chosen, rejected)
                loss.backward()
                optimizer.step()
            read()
            if epoch == 0:
                self.evaluate(policy)
                read()
        checkpoint = {"model": copy.deepcopy(policy.state_dict()), "optimizer": copy.deepcopy(optimizer.state_dict())}
        del checkpoint
        read()
        if self.p.get("ends"):
            del reference
        else:
            torch.cuda.empty_cache()
        read()

    @no_grad
    def evaluate(self, model: Any) -> None:
        ids = self.ids(self.p["test"]).to("cuda")
        for _ in range(2):
            scores = model(ids)  # noqa: F841 - a variable that lives until the next


class MeanTeacher(Loop):
    """A teacher is an average of the student's weights; both are evaluated."""

    def student(self) -> nn.Module:
        return Images(self.p["width"], self.p["depth"])

    def modules(self) -> Modules:
        student, teacher = self.student(), self.student()
        x, y = torch.zeros(2, 3, 32, 32), torch.zeros(2, dtype=torch.int64)
        return {
            "student": (student, (x,)),
            "teacher": (teacher, (x,)),
            "both": (Joint(consistency_loss, student=student, teacher=teacher), (x, y)),
        }

    parts: ClassVar[Parts] = {"both": {"student": "student", "teacher": "teacher"}}

    def instants(self) -> Iterator[dict[str, Any]]:
        size = {"resolution": self.p["side"]}
        yield {"load": "student"}
        yield {"copy": {"model": "teacher", "of": "student"}}
        for _ in range(2):
            for _ in range(2):
                yield self.step("both", **size)
                yield {"average": {"model": "teacher", "temporaries": 3 if self.p.get("expression") else 0}}
            for model in ("student", "teacher"):
                yield {"evaluate": {"model": model, "batch": self.p["test"], "times": 2, "gather": "list", **size}}

    def run(self, read: Read) -> None:
        side = self.p["side"]
        student = on_gpu(self.student())
        read()
        teacher = copy.deepcopy(student)
        read()
        optimizer = self.optimizer(student.parameters(), 1e-3)
        x = torch.empty(self.p["batch"], 3, side, side).to("cuda")
        y = torch.zeros(self.p["batch"], dtype=torch.int64).to("cuda")
        for _ in range(2):
            for _ in range(2):
                optimizer.zero_grad()
                loss = consistency_loss(student, teacher, x, y)
                loss.backward()
                optimizer.step()
                read()
                self.update(student, teacher)
                read()
            for model in (student, teacher):
                self.evaluate(model)
                read()

    @no_grad
    def update(self, student: Any, teacher: Any) -> None:
        for average, now in zip(teacher.parameters(), student.parameters(), strict=True):
            if self.p.get("expression"):
                average.copy_(0.99 * average + 0.01 * now)
            else:
                average.lerp_(now, 0.01)

    @no_grad
    def evaluate(self, model: Any) -> None:
        model.eval()
        x = torch.empty(self.p["test"], 3, self.p["side"], self.p["side"]).to("cuda")
        outputs = [model(x) for _ in range(2)]  # noqa: F841
        model.train()


class Byol(Loop):
    """Two views, an online network with a predictor, and a target that is an average of the online one."""

    def networks(self) -> tuple[nn.Module, nn.Module, nn.Module]:
        width = self.p["width"]
        return Images(width, 3, 256), mlp(256, self.p["wide"], 256), Images(width, 3, 256)

    def modules(self) -> Modules:
        online, predictor, target = self.networks()
        x = torch.zeros(2, 3, self.p["side"], self.p["side"])
        return {
            "online": (online, (x,)),
            "predictor": (predictor, (torch.zeros(2, 256),)),
            "target": (target, (x,)),
            "all": (Joint(byol_loss, online=online, predictor=predictor, target=target), (x, x)),
        }

    parts: ClassVar[Parts] = {"all": {"online": "online", "predictor": "predictor", "target": "target"}}

    def instants(self) -> Iterator[dict[str, Any]]:
        yield {"load": "online"}
        yield {"load": "predictor"}
        yield {"copy": {"model": "target", "of": "online"}}
        for _ in range(3):
            yield self.step("all")
            yield {"average": {"model": "target"}}
        yield {"evaluate": {"model": "online", "batch": self.p["test"], "times": 4, "gather": "concat"}}

    def run(self, read: Read) -> None:
        online, predictor, _ = self.networks()
        online = on_gpu(online)
        read()
        predictor = on_gpu(predictor)
        read()
        target = copy.deepcopy(online)
        read()
        optimizer = self.optimizer([*online.parameters(), *predictor.parameters()], 1e-3)
        shape = 3, self.p["side"], self.p["side"]
        x, other = torch.empty(self.p["batch"], *shape).to("cuda"), torch.empty(self.p["batch"], *shape).to("cuda")
        for _ in range(3):
            optimizer.zero_grad()
            loss = byol_loss(online, predictor, target, x, other)
            loss.backward()
            optimizer.step()
            read()
            with torch.no_grad():
                for average, now in zip(target.parameters(), online.parameters(), strict=True):
                    average.mul_(0.99).add_(now, alpha=0.01)
            read()
        self.embed(online)
        read()

    @no_grad
    def embed(self, model: Any) -> None:
        model.eval()
        x = torch.empty(self.p["test"], 3, self.p["side"], self.p["side"]).to("cuda")
        bank = model(x)
        for _ in range(3):
            features = model(x)
            bank = torch.cat((bank, features))


class Ppo(Loop):
    """An actor, a critic and a reference: rollouts without history, whose results are kept, then updates of actor and
    critic. With `shared` these have one trunk."""

    def networks(self) -> tuple[nn.Module, nn.Module, nn.Module]:
        dim, depth = self.p["dim"], self.p["depth"]
        trunk = Trunk(dim, depth, 1500)
        actor = Headed(trunk, dim, 1500)
        critic = Headed(trunk if self.p.get("shared") else Trunk(dim, depth, 1500), dim, 1)
        return actor, critic, Headed(Trunk(dim, depth, 1500), dim, 1500)

    def ids(self, count: int) -> torch.Tensor:
        return torch.zeros(count, self.p["length"], dtype=torch.int64)

    def modules(self) -> Modules:
        actor, critic, reference = self.networks()
        ids, numbers = self.ids(2), torch.zeros(2)
        values = torch.zeros(2, self.p["length"])
        return {
            "actor": (actor, (ids,)),
            "critic": (critic, (ids,)),
            "reference": (reference, (ids,)),
            "rollout": (Joint(rollout, actor=actor, critic=critic, reference=reference), (ids,)),
            "update": (Joint(ppo_loss, actor=actor, critic=critic), (ids, numbers, numbers, values)),
        }

    @property
    def parts(self) -> dict[str, dict[str, str]]:  # type: ignore[override]
        if not self.p.get("shared"):
            both = {"actor": "actor", "critic": "critic"}
            return {"rollout": {**both, "reference": "reference"}, "update": both}
        heads = {"actor.head": "head of actor", "critic.head": "head of critic", "actor.trunk": "trunk"}
        alone = {name: {"trunk": "trunk", "head": f"head of {name}"} for name in ("actor", "critic")}
        return {**alone, "rollout": {**heads, "reference": "reference"}, "update": heads}

    def instants(self) -> Iterator[dict[str, Any]]:
        for name in ("actor", "critic", "reference"):
            yield {"load": name}
        for _ in range(2):
            yield {"evaluate": {"model": "rollout", "batch": self.p["rollouts"], "times": 3, "gather": "list"}}
            yield self.step("update", times=4)

    def run(self, read: Read) -> None:
        actor, critic, reference = self.networks()
        actor = actor.to_empty(device="cpu")
        critic = critic.to_empty(device="cpu")
        actor = actor.to("cuda")
        read()
        critic = critic.to("cuda")
        read()
        reference = on_gpu(reference)
        read()
        parameters = {*actor.parameters(), *critic.parameters()}
        optimizer = self.optimizer(
            [*actor.parameters(), *(p for p in critic.parameters() if p in parameters - {*actor.parameters()})]
        )
        ids = None
        for _ in range(2):
            self.collect(actor, critic, reference)
            read()
            for _ in range(4):
                if ids is None:
                    ids = self.ids(self.p["batch"]).to("cuda")
                    before, gains = torch.empty(self.p["batch"]).to("cuda"), torch.empty(self.p["batch"]).to("cuda")
                    returns = torch.empty(self.p["batch"], self.p["length"]).to("cuda")
                optimizer.zero_grad()
                loss = ppo_loss(actor, critic, ids, before, gains, returns)
                loss.backward()
                optimizer.step()
            read()

    @no_grad
    def collect(self, actor: Any, critic: Any, reference: Any) -> None:
        ids = self.ids(self.p["rollouts"]).to("cuda")
        kept = [rollout(actor, critic, reference, ids) for _ in range(3)]  # noqa: F841


class SoftActorCritic(Loop):
    """Twin critics with averaged targets, then the actor through the frozen critics."""

    def networks(self) -> list[nn.Module]:
        wide = self.p["wide"]
        return [mlp(24, wide, 1), mlp(24, wide, 1), mlp(24, wide, 1), mlp(24, wide, 1), mlp(17, wide, 7)]

    def batch(self, count: int) -> tuple[torch.Tensor, ...]:
        return torch.zeros(count, 17), torch.zeros(count, 7), torch.zeros(count, 1), torch.zeros(count, 17)

    def modules(self) -> Modules:
        q1, q2, t1, t2, actor = self.networks()
        s, a, r, after = self.batch(2)
        both, wide = torch.cat((s, a), 1), (torch.cat((s, a), 1),)
        return {
            "q1": (q1, (both,)),
            "q2": (q2, wide),
            "t1": (t1, wide),
            "t2": (t2, wide),
            "actor": (actor, (s,)),
            "critics": (Joint(q_loss, q1=q1, q2=q2, t1=t1, t2=t2, actor=actor), (s, a, r, after)),
            "acting": (Joint(actor_loss, actor=actor, q1=q1, q2=q2), (s,)),
        }

    parts: ClassVar[Parts] = {
        "critics": {name: name for name in ("q1", "q2", "t1", "t2", "actor")},
        "acting": {name: name for name in ("actor", "q1", "q2")},
    }

    def instants(self) -> Iterator[dict[str, Any]]:
        yield {"load": "actor"}
        for name in ("q1", "q2"):
            yield {"load": name}
        for number in (1, 2):
            yield {"copy": {"model": f"t{number}", "of": f"q{number}"}}
        for _ in range(3):
            yield self.step("critics")
            yield self.step("acting", freeze="^q")
            yield {"average": {"model": "t1"}}

    def run(self, read: Read) -> None:
        q1, q2, _, _, actor = self.networks()
        actor = on_gpu(actor)
        read()
        q1 = on_gpu(q1)
        read()
        q2 = on_gpu(q2)
        read()
        t1 = copy.deepcopy(q1)
        read()
        t2 = copy.deepcopy(q2)
        read()
        of_critics = self.optimizer([*q1.parameters(), *q2.parameters()])
        of_actor = self.optimizer(actor.parameters())
        s2 = None
        s, a, r, after = (one.to("cuda") for one in self.batch(self.p["batch"]))
        for _ in range(3):
            of_critics.zero_grad()
            loss_q = q_loss(q1, q2, t1, t2, actor, s, a, r, after)
            loss_q.backward()
            of_critics.step()
            read()
            if s2 is None:
                s2 = torch.zeros(self.p["batch"], 17).to("cuda")
            for q in (q1, q2):
                q.requires_grad_(False)
            of_actor.zero_grad()
            loss = actor_loss(actor, q1, q2, s2)
            loss.backward()
            of_actor.step()
            for q in (q1, q2):
                q.requires_grad_(True)
            read()
            with torch.no_grad():
                for target, q in ((t1, q1), (t2, q2)):
                    torch._foreach_lerp_(list(target.parameters()), list(q.parameters()), 0.005)
            read()


class Perceptual(Loop):
    """Images by a loss of features of a frozen network, through which gradients go."""

    def networks(self) -> tuple[nn.Module, nn.Module]:
        return Translator(self.p["width"]), Images(self.p["judge"], 2).requires_grad_(False)

    def modules(self) -> Modules:
        translator, judge = self.networks()
        x = torch.zeros(2, 3, 64, 64)
        both = Joint(perceptual_loss, translator=translator, judge=judge)
        return {"translator": (translator, (x,)), "judge": (judge, (x,)), "both": (both, (x, x))}

    parts: ClassVar[Parts] = {"both": {"translator": "translator", "judge": "judge"}}

    def instants(self) -> Iterator[dict[str, Any]]:
        size = {"resolution": self.p["side"]}
        yield {"load": "translator"}
        yield {"load": "judge"}
        for _ in range(2):
            yield self.step("both", times=2, **size)
            yield {"evaluate": {"model": "translator", "batch": 1, "times": 2, "resolution": 2 * self.p["side"]}}
        yield {"sleep": "judge"}
        yield {"evaluate": {"model": "translator", "batch": self.p["batch"], "times": 2, "gather": "concat", **size}}
        yield {"wake": "judge"}
        yield self.step("both", times=2, **size)

    def run(self, read: Read) -> None:
        translator, judge = self.networks()
        translator = on_gpu(translator)
        read()
        judge = on_gpu(judge)
        read()
        optimizer = self.optimizer(translator.parameters())
        side = self.p["side"]
        x, wanted = (torch.empty(self.p["batch"], 3, side, side).to("cuda") for _ in range(2))
        for epoch in range(3):
            for _ in range(2):
                optimizer.zero_grad()
                loss = perceptual_loss(translator, judge, x, wanted)
                loss.backward()
                optimizer.step()
            read()
            if epoch < 2:
                self.translate(translator, 1, 2 * side, False)
                read()
            if epoch == 1:
                judge.to("cpu")
                read()
                self.translate(translator, self.p["batch"], side, True)
                read()
                judge.to("cuda")
                read()

    @no_grad
    def translate(self, model: Any, batch: int, side: int, gathers: bool) -> None:
        x = torch.empty(batch, 3, side, side).to("cuda")
        made: Any = None
        for _ in range(2):
            output = model(x)
            if gathers:
                made = output if made is None else torch.cat((made, output))


class Cycle(Loop):
    """Two translators and two judges."""

    def networks(self) -> list[nn.Module]:
        width = self.p["width"]
        return [Translator(width), Translator(width), Discriminator(width), Discriminator(width)]

    names = "there", "back", "judge_a", "judge_b"

    def modules(self) -> Modules:
        all_of_them = dict(zip(self.names, self.networks(), strict=True))
        x = torch.zeros(2, 3, 64, 64)
        single: Modules = {name: (one, (x,)) for name, one in all_of_them.items()}
        return {
            **single,
            "cycle": (Joint(cycle_loss, **all_of_them), (x, x)),
            "judging": (Joint(judges_loss, **all_of_them), (x, x)),
        }

    parts: ClassVar[Parts] = {
        one: {name: name for name in ("there", "back", "judge_a", "judge_b")} for one in ("cycle", "judging")
    }

    def instants(self) -> Iterator[dict[str, Any]]:
        for name in self.names:
            yield {"load": name}
        for _ in range(2):
            yield self.step("cycle", freeze="^judge")
            yield self.step("judging")
        for name in self.names[2:]:
            yield {"end": name}
        yield {"evaluate": {"model": "there", "batch": 2 * self.p["batch"], "times": 2, "gather": "list"}}

    def run(self, read: Read) -> None:
        there, back, judge_a, judge_b = self.networks()
        there = on_gpu(there)
        read()
        back = on_gpu(back)
        read()
        judge_a = on_gpu(judge_a)
        read()
        judge_b = on_gpu(judge_b)
        read()
        of_judges = self.optimizer([*judge_a.parameters(), *judge_b.parameters()])
        of_both = self.optimizer([*there.parameters(), *back.parameters()])
        a, b = (torch.empty(self.p["batch"], 3, 64, 64).to("cuda") for _ in range(2))
        a2 = None
        for _ in range(2):
            for judge in (judge_a, judge_b):
                judge.requires_grad_(False)
            of_both.zero_grad()
            loss = cycle_loss(there, back, judge_a, judge_b, a, b)
            loss.backward()
            of_both.step()
            read()
            for judge in (judge_a, judge_b):
                judge.requires_grad_(True)
            if a2 is None:
                a2, b2 = (torch.empty(self.p["batch"], 3, 64, 64).to("cuda") for _ in range(2))
            of_judges.zero_grad()
            loss_j = judges_loss(there, back, judge_a, judge_b, a2, b2)
            loss_j.backward()
            of_judges.step()
            read()
        del judge
        of_judges.param_groups[0]["params"] = [*judge_b.parameters()]
        for p in judge_a.parameters():
            of_judges.state.pop(p, None)
        del judge_a, p
        read()
        del of_judges, judge_b
        read()
        self.translate(there)
        read()

    @no_grad
    def translate(self, model: Any) -> None:
        x = torch.empty(2 * self.p["batch"], 3, 64, 64).to("cuda")
        made = [model(x) for _ in range(2)]  # noqa: F841


class TwoTowers(Loop):
    """Images beside texts; each tower is evaluated alone, over its own batches."""

    def networks(self) -> tuple[nn.Module, nn.Module]:
        dim = self.p["dim"]
        return Images(self.p["width"], 2, dim), Trunk(dim, 2, 1000)

    def batch(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.empty(count, 3, 64, 64), torch.zeros(count, self.p["length"], dtype=torch.int64)

    def modules(self) -> Modules:
        images, texts = self.networks()
        x, ids = self.batch(2)
        both = Joint(contrastive_loss, images=images, texts=texts)
        return {"images": (images, (x,)), "texts": (texts, (ids,)), "both": (both, (x, ids))}

    parts: ClassVar[Parts] = {"both": {"images": "images", "texts": "texts"}}

    def instants(self) -> Iterator[dict[str, Any]]:
        yield {"load": "images"}
        yield {"load": "texts"}
        for _ in range(2):
            yield self.step("both", times=2)
            yield {"evaluate": {"model": "images", "batch": self.p["test"], "times": 3, "gather": "concat"}}
            yield {"evaluate": {"model": "texts", "batch": 2 * self.p["test"], "times": 3, "gather": "list"}}

    def run(self, read: Read) -> None:
        images, texts = self.networks()
        images = on_gpu(images)
        read()
        texts = on_gpu(texts)
        read()
        optimizer = self.optimizer([*images.parameters(), *texts.parameters()])
        x, ids = (one.to("cuda") for one in self.batch(self.p["batch"]))
        for _ in range(2):
            for _ in range(2):
                optimizer.zero_grad()
                loss = contrastive_loss(images, texts, x, ids)
                loss.backward()
                optimizer.step()
            read()
            self.index(images, 0, self.p["test"])
            read()
            self.index(texts, 1, 2 * self.p["test"])
            read()

    @no_grad
    def index(self, model: Any, which: int, count: int) -> None:
        x = self.batch(count)[which].to("cuda")
        found: list[Any] = []
        model.eval()
        for _ in range(3):
            made = model(x)
            if which == 0:
                found = [made if not found else torch.cat((found[0], made))]
            else:
                found.append(made)
        model.train()


class Rewards(Loop):
    """A reward model over pairs, whose trunk comes from a language model that is trained before, and saved between."""

    def networks(self) -> tuple[nn.Module, nn.Module]:
        dim = self.p["dim"]
        trunk = Trunk(dim, self.p["depth"], 1000)
        return Headed(trunk, dim, 1000), Headed(trunk, dim, 1)

    def ids(self, count: int) -> torch.Tensor:
        return torch.zeros(count, self.p["length"], dtype=torch.int64)

    @staticmethod
    def next_tokens(model: Any, ids: Any) -> Any:
        return F.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    def modules(self) -> Modules:
        language, reward = self.networks()
        ids = self.ids(2)
        return {
            "language": (language, (ids,)),
            "reward": (reward, (ids,)),
            "reading": (Joint(self.next_tokens, language=language), (ids,)),
            "pairs": (Joint(reward_loss, reward=reward), (ids, ids)),
        }

    parts: ClassVar[Parts] = {
        "language": {"trunk": "trunk", "head": "its head"},
        "reading": {"language.trunk": "trunk", "language.head": "its head"},
        "reward": {"trunk": "trunk", "head": "reward's head"},
        "pairs": {"reward.trunk": "trunk", "reward.head": "reward's head"},
    }

    def instants(self) -> Iterator[dict[str, Any]]:
        yield {"load": "language"}
        yield self.step("reading", times=3)
        yield {"save": {"model": "language", "copies": "model"}}
        yield {"load": "reward"}
        yield self.step("pairs", times=3)
        yield {"evaluate": {"model": "reward", "batch": self.p["test"], "times": 3, "gather": "list"}}
        yield {"evaluate": {"model": "language", "batch": 2, "times": 2}}

    def run(self, read: Read) -> None:
        language, reward = self.networks()
        language, reward = language.to_empty(device="cpu"), reward.to_empty(device="cpu")
        language = language.to("cuda")
        read()
        optimizer = self.optimizer([*language.trunk.parameters(), *language.head.parameters()])
        ids = self.ids(self.p["batch"]).to("cuda")
        for _ in range(3):
            optimizer.zero_grad()
            loss = self.next_tokens(language, ids)
            loss.backward()
            optimizer.step()
        read()
        saved = copy.deepcopy(language.state_dict())
        del saved
        read()
        reward = reward.to("cuda")
        read()
        optimizer.add_param_group({"params": [*reward.head.parameters()]})
        chosen, rejected = (self.ids(self.p["batch"]).to("cuda") for _ in range(2))
        head = [*language.head.parameters()]
        for _ in range(3):
            for p in optimizer.param_groups[0]["params"]:
                if not any(p is one for one in head):
                    p.grad = None
            for p in optimizer.param_groups[1]["params"]:
                p.grad = None
            loss_of_pairs = reward_loss(reward, chosen, rejected)
            loss_of_pairs.backward()
            kept = [p.grad for p in head]
            for p in head:
                p.grad = None
            optimizer.step()
            for p, grad in zip(head, kept, strict=True):
                p.grad = grad
            del kept, grad
        read()
        self.evaluate(reward, self.p["test"], 3, True)
        read()
        self.evaluate(language, 2, 2, False)
        read()

    @no_grad
    def evaluate(self, model: Any, count: int, times: int, gathers: bool) -> None:
        ids = self.ids(count).to("cuda")
        kept = []
        for _ in range(times):
            scores = model(ids)
            if gathers:
                kept.append(scores)


CASES: dict[str, Loop] = {
    "gan": Gan(width=16, batch=16, epochs=2, images=64, gather="none"),
    "gan, images in a list": Gan(width=24, batch=32, epochs=2, images=32, gather="list", optimizer="adam"),
    "gan, images joined": Gan(width=32, batch=8, epochs=2, images=128, gather="concat", optimizer="adam"),
    "wgan": Gan(width=16, batch=64, epochs=1, images=16, gather="none", critics=3, wasserstein=True, optimizer="adam"),
    "wgan, large": Gan(width=48, batch=24, epochs=2, images=256, gather="list", critics=2, wasserstein=True),
    "distillation": Distillation(width=32, side=64, batch=16, test=32, gather="none"),
    "distillation, list": Distillation(width=32, side=96, batch=8, test=64, gather="list", optimizer="sgd"),
    "distillation, joined, saved": Distillation(width=64, side=32, batch=48, test=16, gather="concat", save=True),
    "distillation of features": Distillation(width=48, wide=48, side=64, batch=12, test=24, gather="none", hints=True),
    "distillation of features, sgd": Distillation(
        width=96, wide=96, side=48, batch=8, test=80, gather="list", hints=True, optimizer="sgd"
    ),
    "distillation of decoders": Distillation(dim=128, length=64, batch=8, test=16, gather="none"),
    "distillation of decoders, list": Distillation(
        dim=192, length=128, batch=4, test=8, gather="list", optimizer="adam"
    ),
    "distillation of decoders, joined": Distillation(dim=256, length=48, batch=6, test=20, gather="concat", save=True),
    "dpo": Preferences(dim=128, depth=2, length=64, batch=4, test=16),
    "dpo, long": Preferences(dim=128, depth=3, length=256, batch=2, test=4, optimizer="adam"),
    "dpo of a copy": Preferences(dim=192, depth=2, length=96, batch=3, test=8, copied=True),
    "dpo, joined": Preferences(dim=256, depth=2, length=64, batch=4, test=12, joined=True),
    "dpo, joined, of a copy": Preferences(
        dim=128, depth=4, length=128, batch=4, test=6, joined=True, copied=True, ends=True
    ),
    "dpo, the reference ends": Preferences(dim=320, depth=2, length=32, batch=8, test=16, ends=True),
    "mean teacher": MeanTeacher(width=32, depth=2, side=64, batch=16, test=32),
    "mean teacher by an expression": MeanTeacher(width=48, depth=3, side=32, batch=32, test=64, expression=True),
    "mean teacher, wide": MeanTeacher(width=256, depth=3, side=32, batch=16, test=16, expression=True, optimizer="sgd"),
    "mean teacher, large evaluation": MeanTeacher(width=64, depth=1, side=96, batch=4, test=48, optimizer="adam"),
    "byol": Byol(width=32, wide=1024, side=64, batch=16, test=64),
    "byol, wide predictor": Byol(width=64, wide=4096, side=32, batch=32, test=128, optimizer="sgd"),
    "byol, small": Byol(width=16, wide=512, side=48, batch=64, test=16, optimizer="adam"),
    "ppo": Ppo(dim=128, depth=2, length=64, batch=4, rollouts=16),
    "ppo, long": Ppo(dim=128, depth=3, length=192, batch=2, rollouts=8, optimizer="adam"),
    "ppo, wide": Ppo(dim=320, depth=2, length=48, batch=8, rollouts=8),
    "ppo with one trunk": Ppo(dim=128, depth=3, length=64, batch=4, rollouts=12, shared=True),
    "ppo with one trunk, wide": Ppo(dim=384, depth=2, length=96, batch=4, rollouts=6, shared=True, optimizer="adam"),
    "ppo with one trunk, long": Ppo(dim=192, depth=2, length=256, batch=2, rollouts=4, shared=True, optimizer="sgd"),
    "sac": SoftActorCritic(wide=256, batch=256, optimizer="adam"),
    "sac, wide": SoftActorCritic(wide=1024, batch=1024, optimizer="adam"),
    "sac, large batch": SoftActorCritic(wide=512, batch=8192),
    "perceptual": Perceptual(width=32, judge=32, side=64, batch=8),
    "perceptual, large": Perceptual(width=16, judge=64, side=128, batch=4, optimizer="adam"),
    "perceptual, sgd": Perceptual(width=64, judge=96, side=96, batch=6, optimizer="sgd"),
    "cycle": Cycle(width=16, batch=8, optimizer="adam"),
    "cycle, wide": Cycle(width=48, batch=4),
    "cycle, sgd": Cycle(width=32, batch=16, optimizer="sgd"),
    "two towers": TwoTowers(dim=128, width=32, length=32, batch=16, test=64),
    "two towers, long": TwoTowers(dim=256, width=48, length=77, batch=24, test=32, optimizer="adam"),
    "two towers, sgd": TwoTowers(dim=192, width=64, length=64, batch=12, test=128, optimizer="sgd"),
    "rewards": Rewards(dim=128, depth=2, length=64, batch=4, test=16),
    "rewards, wide": Rewards(dim=320, depth=2, length=96, batch=4, test=8, optimizer="adam"),
    "rewards, deep": Rewards(dim=192, depth=5, length=48, batch=6, test=32),
}


def readings_of(loop: Loop) -> list[list[int]]:
    """After each instant: peaks of allocated and of reserved memory meanwhile, and both at its end."""
    readings: list[list[int]] = []

    def read() -> None:
        peaks = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        readings.append([*peaks, torch.cuda.memory_allocated(), torch.cuda.memory_reserved()])
        torch.cuda.reset_peak_memory_stats()

    torch.cuda.reset_peak_memory_stats()
    loop.run(read)
    return readings


def pack() -> None:
    """Writes loops.zip, the recordings of all modules, each once."""
    import hashlib
    import zipfile

    from record import OUT

    from staticmem.frontends.carried import archive_of
    from staticmem.recording.record import record

    texts, index = {}, {}
    for name, loop in CASES.items():
        with torch.device("meta"):
            modules = loop.modules()
        for model, (module, inputs) in modules.items():
            document = record(module, inputs)
            archive = zipfile.ZipFile(io.BytesIO(archive_of(document)))
            text = archive.read(next(member for member in archive.namelist() if member.endswith(".txt")))
            key = index[f"{name}/{model}"] = hashlib.sha256(text).hexdigest()[:12]
            texts[f"{key}.txt"] = text
    with zipfile.ZipFile(OUT / "loops.zip", "w") as packed:
        for member, content in {"index.json": json.dumps(index).encode(), **texts}.items():
            packed.writestr(zipfile.ZipInfo(member, (2026, 1, 1, 0, 0, 0)), content)


def main() -> None:
    if "--modules" in sys.argv:
        pack()
        return
    if "--one" not in sys.argv:
        sys.path.insert(0, str(HERE))
        from record import OUT, under_stub

        sizes = {"STUB_TOTAL": str(TOTAL), "STUB_CAPACITY": str(TOTAL)}
        none = {"CUBLAS_WORKSPACE_CONFIG": ":0:0", "CUBLASLT_WORKSPACE_SIZE": "0"}
        rows = under_stub("loops.py", {"names": list(CASES)}, PYTORCH_CUDA_ALLOC_CONF="", **sizes, **none)
        data = json.dumps(rows, separators=(",", ":")).encode()
        with open(OUT / "loops.gz", "wb") as file:
            file.write(gzip.compress(data, mtime=0))
        return
    torch.cuda.init()
    rows = {"torch": torch.__version__}
    for name in json.load(sys.stdin)["names"]:
        rows[name] = readings_of(CASES[name])
        gc.collect()
        torch.cuda.empty_cache()
        assert torch.cuda.memory_reserved() == 0, (name, torch.cuda.memory_reserved())
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
