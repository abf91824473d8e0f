"""A pipeline of diffusers as one module: in training the step of its denoiser, as diffusers' examples write it; in
inference the call of the pipeline itself.

What the denoiser is given besides its latents is not written down here: the pipeline's own code says it, which runs up
to the denoiser's first call. Tokenizers are stand-ins that give ids of the right length.

Sources: diffusers 0.42, examples/text_to_image/train_text_to_image.py and train_text_to_image_lora.py,
examples/dreambooth/train_dreambooth_lora_flux.py (the loop, and what of it is local), pipelines/pipeline_utils.py.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_flatten_with_path, tree_unflatten

from staticmem.child import FailedError
from staticmem.recording.example_inputs import Built, Example

DENOISERS = ("unet", "transformer")
VAE = "vae"
CACHED = "cached"
IMAGES, LATENTS, TIMESTEP = "pixel_values", "latents", "timestep"
NOISE_STEPS = 1000  # of training; the number changes no size
STEPS = 4  # of an example: solvers hold at most the last four predictions (PNDM, DPM-Solver, UniPC)
TOKENS = 512  # of a prompt, where neither the tokenizer nor the encoder has a limit
_OPTIONAL = ("safety_checker", "feature_extractor", "image_encoder")
_NOT_MODELS = ("ImageProcessor", "FeatureExtractor", "ImageProcessorFast")  # ends of classes
Build = Callable[[Callable[[], Any]], Any]


def built_of(job: Mapping[str, Any], on_meta: Build) -> Built:
    """The module of a pipeline, or of a part of it, with its example inputs.

    Raises:
        FailedError: the installed packages have no such class, or the pipeline is none that is built.
    """
    pipeline = Pipeline(job, on_meta)
    part = job["options"].get("part")
    return pipeline.part(part) if part else pipeline.whole()


class Tokenizer:
    """Stands for a tokenizer: `ids` are given for the first prompts, for others new ones."""

    added_tokens_encoder: Mapping[str, int] = {}
    bos_token_id, eos_token_id, pad_token_id = 0, 0, 0

    def __init__(self, length: int) -> None:
        self.model_max_length = length
        self.asked = 0  # tokens of a prompt, as the pipeline wants them
        self.ids: torch.Tensor | None = None
        self.device: Any = "meta"

    def __call__(self, text: Any, padding: Any = None, max_length: int | None = None, **_: Any) -> Any:
        length, rows = max_length or self.model_max_length, 1 if isinstance(text, str) else len(text)
        if padding == "longest":  # which the pipelines compare, to warn of prompts that were cut
            return _Tokens(torch.zeros((rows, 1), dtype=torch.int64, device=self.device))
        ids, self.ids, self.asked = self.ids, None, length
        if ids is None or tuple(ids.shape) != (rows, length):
            ids = torch.zeros((rows, length), dtype=torch.int64, device=self.device)
        return _Tokens(ids)

    def tokenize(self, text: str) -> list[str]:
        return []


class _Tokens(dict[str, Any]):
    def __init__(self, ids: torch.Tensor) -> None:
        super().__init__(input_ids=ids, attention_mask=torch.ones_like(ids))
        self.__dict__ = self


class _CaughtError(Exception):
    """What a module was called with."""

    def __init__(self, args: Any, kwargs: Any) -> None:
        super().__init__()
        self.given = args, kwargs


class _Catcher:
    """Stands for a module of a pipeline, and catches its first call."""

    def __init__(self, module: Any) -> None:
        self.module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise _CaughtError(args, kwargs)


class _Solver:
    """Stands for a scheduler in inference: the step of Euler's method, in float32 as theirs. Its own reads numbers of
    tensors, which have none here; what others keep besides has the size of latents."""

    order, init_noise_sigma = 1, 1.0

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler

    def __getattr__(self, name: str) -> Any:
        return getattr(self.scheduler, name)

    def set_timesteps(
        self,
        num_inference_steps: int | None = None,
        device: Any = None,
        timesteps: Any = None,
        sigmas: Any = None,
        mu: Any = None,
    ) -> None:
        self.num_inference_steps = num_inference_steps or len(timesteps if timesteps is not None else sigmas)
        self.timesteps = torch.zeros(self.num_inference_steps, device=device)

    def scale_model_input(self, sample: torch.Tensor, *_: Any) -> torch.Tensor:
        return sample / 2.0 if hasattr(self.scheduler, "init_noise_sigma") else sample

    def step(self, model_output: torch.Tensor, timestep: Any, sample: torch.Tensor, return_dict: bool = True) -> Any:
        moved = sample.float() + 0.5 * model_output
        return (moved.to(model_output.dtype),)


class Pipeline:
    """A pipeline whose parts are built without weights."""

    def __init__(self, job: Mapping[str, Any], on_meta: Build) -> None:
        import diffusers

        self.job, self.options, self.example = job, job["options"], Example(job)
        content = job["config"]
        cls = _class_of(diffusers, content["class"])
        if not issubclass(cls, diffusers.DiffusionPipeline):
            raise FailedError("refused", f"{content['class']} is no pipeline of diffusers")
        self.dtype = getattr(torch, self.options.get("dtype", "float32"))
        frozen = self.options.get("frozen")
        self.frozen_dtype = getattr(torch, frozen) if frozen else self.dtype
        self.models: dict[str, Any] = {}
        self.tokenizers: dict[str, Tokenizer] = {}
        parts = {name: self._built(name, part, on_meta) for name, part in content["parts"].items()}
        taken = inspect.signature(cls.__init__).parameters
        # parts that the index leaves out, or has as none
        optional = {name: None for name in taken if name in cls._optional_components or name in _OPTIONAL}
        settings = {name: value for name, value in content["settings"].items() if name in taken}
        given = {**optional, **parts, **settings}
        self.pipe = cls(**{name: value for name, value in given.items() if name in taken})
        self.pipe.set_progress_bar_config(disable=True)
        self.scheduler = self.pipe.scheduler
        self.pipe.__dict__["scheduler"] = _Solver(self.scheduler)
        if hasattr(self.pipe, "run_safety_checker"):  # it reads pixels, and needs less than the decoder did
            self.pipe.run_safety_checker = lambda image, *_: (image, None)
        self.denoiser = next((name for name in DENOISERS if name in self.models), "")
        if not self.denoiser or VAE not in self.models:
            raise FailedError("refused", f"{content['class']} has no unet or transformer with a vae")
        if self.options.get("checkpointing") == "yes":
            self.models[self.denoiser].enable_gradient_checkpointing()
        for switch in ("tiling", "slicing"):
            if self.options.get(switch) == "yes":
                getattr(self.models[VAE], f"enable_{switch}")()
        self.batch = self.example.of("batch", 2)
        self.side = int(self.options.get("size") or self._usual_side())
        self.has_flow = not hasattr(self.scheduler, "alphas_cumprod")

    def _built(self, name: str, part: Mapping[str, Any], on_meta: Build) -> Any:
        """A part: its model, a scheduler, or what stands for a tokenizer."""
        library, title, content = part["library"], part["class"], part["config"]
        if "Tokenizer" in title:
            encoder = self.job["config"]["parts"].get(name.replace("tokenizer", "text_encoder"), {}).get("config") or {}
            self.tokenizers[name] = Tokenizer(part["length"] or encoder.get("max_position_embeddings") or TOKENS)
            return self.tokenizers[name]
        if title.endswith(_NOT_MODELS):
            return Tokenizer(0)
        import diffusers
        import transformers

        package: Any = {"diffusers": diffusers, "transformers": transformers}.get(library)
        if package is None:
            package = getattr(diffusers.pipelines, library, None)
        cls = _class_of(package, title)
        if not hasattr(cls, "parameters"):
            return cls.from_config(content)
        if content is None:
            raise FailedError("refused", f"its part '{name}' has no config")
        if issubclass(cls, transformers.PreTrainedModel):
            config = cls.config_class.from_dict(dict(content))
            of_frozen = self.frozen_dtype
            model = on_meta(lambda: cls._from_config(config, dtype=of_frozen))
        else:
            model = on_meta(lambda: cls.from_config(content))
            model.to(dtype=self.dtype if name in DENOISERS else self.frozen_dtype)
        model.to(device="meta").eval()
        model.requires_grad_(name in DENOISERS)
        self.models[name] = model
        return model

    def _usual_side(self) -> int:
        """Of the images: what the denoiser is made for."""
        usual = getattr(self.pipe, "default_sample_size", None)
        usual = usual or getattr(self.models[self.denoiser].config, "sample_size", None)
        if isinstance(usual, (list, tuple)):
            usual = usual[0]
        return int(usual) * int(self.pipe.vae_scale_factor) if usual else 1024

    # -- calls -------------------------------------------------------------------------------------------------------

    def call(self, batch: int, guided: bool, steps: int = 1, output_type: str = "latent") -> Any:
        """The pipeline, with as many prompts."""
        given: dict[str, Any] = {"prompt": ["a"] * batch, "height": self.side, "width": self.side}
        given |= {"num_inference_steps": steps, "output_type": output_type, "return_dict": False}
        if not guided:
            given["guidance_scale"] = 1.0
        taken = inspect.signature(self.pipe.__call__).parameters
        return self.pipe(**{name: value for name, value in given.items() if name in taken})

    def given_to(self, name: str, batch: int, guided: bool = False) -> dict[str, Any]:
        """What the pipeline calls a part with, by the names of its forward."""
        module = self.models[name]
        self.pipe.__dict__[name] = _Catcher(module)
        try:
            self.call(batch, guided)
        except _CaughtError as caught:
            args, kwargs = caught.given
            caught.with_traceback(None)  # its frames hold tensors
        else:
            raise FailedError("refused", f"its pipeline does not call '{name}'")
        finally:
            self.pipe.__dict__[name] = module
        return dict(inspect.signature(module.forward).bind(*args, **kwargs).arguments)

    def use_prompts(self, ids: Mapping[str, torch.Tensor]) -> int:
        """Has tokenizers give these ids; the number of prompts, which is a plain number to the pipeline."""
        for tokenizer, tensor in zip(self.tokenizers.values(), ids.values(), strict=True):
            tokenizer.ids, tokenizer.device = tensor, tensor.device
        return int(next(iter(ids.values())).shape[0])

    @property
    def main(self) -> str:
        """The input of the denoiser that has the latents."""
        return next(iter(inspect.signature(self.models[self.denoiser].forward).parameters))

    @property
    def latent_shape(self) -> tuple[int, int, int]:
        """Of one image: channels, height, width."""
        side = self.side // int(self.pipe.vae_scale_factor)
        return int(self.models[VAE].config.latent_channels), side, side

    def encoded(self, images: torch.Tensor) -> torch.Tensor:
        """Latents of images."""
        result, config = self.models[VAE].encode(images), self.models[VAE].config
        latents = result.latent_dist.sample() if hasattr(result, "latent_dist") else result.latent
        shift = getattr(config, "shift_factor", None)
        return (latents - shift) * config.scaling_factor if shift else latents * config.scaling_factor

    def packed(self, latents: torch.Tensor) -> torch.Tensor:
        """Latents as the denoiser takes them: some take patches."""
        return self.pipe._pack_latents(latents, latents.shape[0], *self.latent_shape)

    def unpacked(self, prediction: torch.Tensor) -> torch.Tensor:
        return self.pipe._unpack_latents(prediction, self.side, self.side, self.pipe.vae_scale_factor)

    # -- modules with their inputs -----------------------------------------------------------------------------------

    def whole(self) -> Built:
        """The step of training, and the call in inference."""
        cached = self.options.get("latents") == CACHED
        of_denoiser = self.given_to(self.denoiser, self.batch[1])
        takes_patches = tuple(of_denoiser[self.main].shape[1:]) != self.latent_shape
        if takes_patches and not hasattr(self.pipe, "_pack_latents"):
            shape = list(of_denoiser[self.main].shape[1:])
            raise FailedError("refused", f"its denoiser takes {shape}, which are no latents {list(self.latent_shape)}")
        of_denoiser = {name: value for name, value in of_denoiser.items() if name not in (self.main, TIMESTEP)}
        given = _Given(of_denoiser) if cached else None
        built = Built(Step(self, given, takes_patches), loss=lambda result: result, trained=self.denoiser)
        for number, tokenizer in enumerate(self.tokenizers.values()):
            name = f"input_ids_{number + 1}" if number else "input_ids"
            built.add(name, torch.int64, [self.batch, ("", tokenizer.asked)])
            built.of_mode |= {name: False} if cached else {}
        if given is None:
            built.add(IMAGES, torch.float32, [self.batch, ("", 3), ("height", self.side), ("width", self.side)])
            built.of_mode[IMAGES] = True
        else:
            built.add(LATENTS, self.frozen_dtype, [self.batch, *(("", n) for n in self.latent_shape)])
            self._add_given(built, given, self.denoiser, False)
            built.of_mode |= dict.fromkeys((LATENTS, *given.tensors), True)
        return built

    def part(self, name: str) -> Built:
        """One part with what the pipeline gives it: where parts are on the GPU in turns."""
        if name not in self.models:
            raise FailedError("option", f"part={name} is none of its parts: {', '.join(self.models)}")
        if name == VAE:
            built = Built(Decoder(self))
            built.add(LATENTS, self.frozen_dtype, [self.batch, *(("", n) for n in self.latent_shape)])
            return built
        guided = name == self.denoiser and self.options.get("guidance") != "no"
        given = _Given(self.given_to(name, self.batch[1], guided))
        built = Built(Part(self.models[name], given))
        self._add_given(built, given, name, guided)
        return built

    def _add_given(self, built: Built, given: _Given, name: str, guided: bool) -> None:
        """Tensors that a part is given; the axes that grow with the batch are open, if no guidance doubles them."""
        more = _Given(self.given_to(name, self.batch[1] + 1, guided))
        for title, tensor in given.tensors.items():
            sizes = [("", int(n)) for n in tensor.shape]
            for axis, (size, other) in enumerate(zip(tensor.shape, more.tensors[title].shape, strict=True)):
                if size != other:
                    sizes[axis] = ("batch", size) if size == self.batch[1] else ("rows", size)
            built.add(title, tensor.dtype, sizes)


class _Given:
    """What a module is called with, and the tensors in it by name."""

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        leaves, self.spec = tree_flatten_with_path(dict(arguments))
        self.leaves = [leaf for _, leaf in leaves]
        self.names = [
            "_".join(str(getattr(key, "key", getattr(key, "idx", key))) for key in path) for path, _ in leaves
        ]

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        named = zip(self.names, self.leaves, strict=True)
        return {name: leaf for name, leaf in named if isinstance(leaf, torch.Tensor)}

    def arguments(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """The same with other tensors."""
        leaves = [inputs.get(name, leaf) for name, leaf in zip(self.names, self.leaves, strict=True)]
        return dict(tree_unflatten(leaves, self.spec))


class Step(torch.nn.Module):  # type: ignore[misc]
    """The step of training of a denoiser, and in evaluation the pipeline's own call. Parts that are frozen stay in
    evaluation, as `from_pretrained` has them."""

    def __init__(self, pipeline: Pipeline, given: _Given | None, takes_patches: bool) -> None:
        super().__init__()
        for name, model in pipeline.models.items():
            if given is None or name == pipeline.denoiser:
                self.add_module(name, model)
        self.of = [pipeline]  # a list: it is no part of the module
        self.given, self.takes_patches = given, takes_patches

    def train(self, mode: bool = True) -> Step:
        super().train(False)
        self.training = mode
        self.get_submodule(self.of[0].denoiser).train(mode)
        return self

    def forward(self, **inputs: torch.Tensor) -> Any:
        return self._trained(inputs) if self.training else self._called(inputs)

    def _called(self, ids: Mapping[str, torch.Tensor]) -> Any:
        pipeline = self.of[0]
        _refuse(pipeline.options, ("latents",), "is of training")
        steps, guided = int(pipeline.options.get("steps") or STEPS), pipeline.options.get("guidance") != "no"
        try:
            return pipeline.call(pipeline.use_prompts(ids), guided, steps, "pt")[0]
        finally:
            pipeline.pipe.scheduler.timesteps = None

    def _trained(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        pipeline, given = self.of[0], self.given
        _refuse(pipeline.options, ("steps", "guidance"), "is of inference")
        if given is not None:
            _refuse(pipeline.options, ("tiling", "slicing"), "is of the VAE, which does not run with cached latents")
        denoiser, scheduler = pipeline.models[pipeline.denoiser], pipeline.scheduler
        if given is None:
            with torch.autocast("cuda", enabled=False):  # accelerate has the denoiser's forward alone run under it
                latents = pipeline.encoded(inputs[IMAGES].to(pipeline.frozen_dtype))
                batch = pipeline.use_prompts({name: ids for name, ids in inputs.items() if name != IMAGES})
                arguments = pipeline.given_to(pipeline.denoiser, batch)
                pipeline.pipe.scheduler.timesteps = None
        else:
            latents, arguments = inputs[LATENTS], given.arguments(inputs)
        noise = torch.randn_like(latents)
        timesteps = torch.randint(0, NOISE_STEPS, (latents.shape[0],), device=latents.device).long()
        sigmas = None
        if pipeline.has_flow:
            sigmas = (timesteps / NOISE_STEPS).to(latents.dtype).reshape(-1, *[1] * (latents.dim() - 1))
            noisy, target = (1.0 - sigmas) * latents + sigmas * noise, noise - latents
        else:
            noisy, target = scheduler.add_noise(latents, noise, timesteps), noise
            if scheduler.config.prediction_type == "v_prediction":
                target = scheduler.get_velocity(latents, noise, timesteps)
        arguments[pipeline.main] = pipeline.packed(noisy) if self.takes_patches else noisy
        arguments[TIMESTEP] = timesteps
        prediction = denoiser(**arguments)[0]
        if self.takes_patches:
            prediction = pipeline.unpacked(prediction)
        if prediction.shape[1] == 2 * latents.shape[1]:  # its variance is learned too
            prediction = prediction.chunk(2, dim=1)[0]
        if sigmas is None:
            loss = torch.nn.functional.mse_loss(prediction.float(), target.float(), reduction="mean")
        else:
            squares = torch.ones_like(sigmas).float() * (prediction.float() - target.float()) ** 2
            loss = torch.mean(squares.reshape(target.shape[0], -1), 1).mean()
        held = {LATENTS: latents, "noise": noise, "timesteps": timesteps, "noisy": noisy, "target": target}
        return {"loss": loss, "prediction": prediction, **held, "conditions": arguments}


class Decoder(torch.nn.Module):  # type: ignore[misc]
    """The last part of a pipeline."""

    def __init__(self, pipeline: Pipeline) -> None:
        super().__init__()
        self.vae = pipeline.models[VAE]

    def forward(self, latents: torch.Tensor) -> torch.Tensor:
        if self.training:
            raise ValueError("part= is of inference: leave it out in training")
        image = self.vae.decode(latents / self.vae.config.scaling_factor, return_dict=False)[0]
        return (image * 0.5 + 0.5).clamp(0, 1)  # image_processor.py, `VaeImageProcessor.denormalize`


class Part(torch.nn.Module):  # type: ignore[misc]
    """A part as the pipeline calls it."""

    def __init__(self, module: Any, given: _Given) -> None:
        super().__init__()
        self.part, self.given = module, given

    def forward(self, **inputs: torch.Tensor) -> Any:
        if self.training:
            raise ValueError("part= is of inference: leave it out in training")
        return self.part(**self.given.arguments(inputs))


def _refuse(options: Mapping[str, str], names: Sequence[str], why: str) -> None:
    """Raises for options that would change nothing."""
    for name in names:
        if name in options:
            raise ValueError(f"{name}= {why}: leave it out")


def _class_of(package: Any, name: str) -> Any:
    cls = getattr(package, name, None) if name.isidentifier() else None
    if not inspect.isclass(cls):
        raise FailedError("unknown", f"the installed packages have no class '{name[:80]}'")
    return cls
