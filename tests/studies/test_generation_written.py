"""Generation of decoders that write their attention out: by hand, and what is refused."""

from typing import Any

import pytest

import staticmem
from staticmem.errors import ModelFileError

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.torch
HEADS, SIZE = 4, 16
WIDTH = HEADS * SIZE


class Attention(torch.nn.Module):  # type: ignore[misc,name-defined]
    """As transformers writes it: repeated keys, scores in the type of the model, softmax in float32."""

    masked = True
    reads_keys = False
    in_float32 = False
    mixes: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.o = torch.nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Any, mask: Any) -> Any:
        batch, tokens, _ = x.shape
        query, key, value = (f(x).view(batch, tokens, HEADS, SIZE).transpose(1, 2) for f in (self.q, self.k, self.v))
        dtype = torch.float32 if self.in_float32 else x.dtype
        scores = torch.matmul(query.to(dtype), key.to(dtype).transpose(2, 3)) * SIZE**-0.5
        if self.masked:
            scores = scores + mask
        weights = torch.nn.functional.softmax(scores, dim=-1, dtype=torch.float32).to(x.dtype)
        result = torch.matmul(weights, value).transpose(1, 2).contiguous()
        result = self.o(result.reshape(batch, tokens, -1))
        if self.mixes is not None:
            result = result + self.mixes(x)
        return result + key.mean() if self.reads_keys else result


class Decoder(torch.nn.Module):  # type: ignore[misc,name-defined]
    def __init__(self, attention: type[Attention]) -> None:
        super().__init__()
        self.embed, self.head = torch.nn.Embedding(50, WIDTH), torch.nn.Linear(WIDTH, 50, bias=False)
        self.attention = attention()

    def forward(self, ids: Any) -> Any:
        batch, tokens = ids.shape
        query, key = (torch.arange(tokens, device=ids.device) + 0 for _ in range(2))
        seen = (key[None, None, None, :] <= query[None, None, :, None]).expand(batch, -1, tokens, tokens)
        dtype = self.embed.weight.dtype
        mask = torch.where(seen, torch.zeros((), device=ids.device, dtype=dtype), torch.finfo(dtype).min)
        x = self.embed(ids)
        return self.head((x + self.attention(x, mask))[:, 0:, :])


def _report(attention: type[Attention] = Attention, **options: Any) -> Any:
    asked = {"mode": "generate", "batch": 3, "prompt": 200, "new_tokens": 57, **options}
    ids = torch.zeros(2, 8, dtype=torch.long)
    return staticmem.analyze(Decoder(attention).to(torch.bfloat16).eval(), (ids,), **asked)


class InFloat32(Attention):
    in_float32 = True


@pytest.mark.parametrize("attention", [Attention, InFloat32])
def test_caches_of_written_attention(attention: type[Attention]) -> None:
    """One layer of 4 heads of 16 elements in 2 bytes, keys and values: 256 bytes a token, whatever multiplies them."""
    for cache in ("dynamic", "static"):
        asked = _report(attention, cache=cache).generation
        assert (asked.token_bytes, asked.cached_tokens, asked.cache_bytes) == (256, 256, 3 * 256 * 256)


def test_scores_have_the_tokens_of_the_cache() -> None:
    """At the peak of the prefill there are masked scores in bfloat16, their copy in float32, what softmax makes of it,
    and the mask, for 200 queries: with a static cache over 256 keys, else over 200. Caches have as many tokens of 256
    bytes."""
    dynamic, static = (_report(cache=cache).phases.forward.peak_bytes for cache in ("dynamic", "static"))
    more = 256 - 200
    assert static - dynamic == pytest.approx(3 * 200 * more * (HEADS * (2 + 4 + 4) + 2) + 3 * more * 256, abs=2048)


class SlicedMask(Attention):
    def forward(self, x: Any, mask: Any) -> Any:
        return super().forward(x, mask[:, :, :, : x.shape[1]])


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_a_mask_that_is_sliced_is_the_same(cache: str) -> None:
    """The slice has the tokens of the cache: it is a view of all of the mask."""
    peaks = {_report(attention, cache=cache).peak.live_bytes for attention in (Attention, SlicedMask)}
    assert len(peaks) == 1


class Unmasked(Attention):
    masked = False


class ReadsKeys(Attention):
    reads_keys = True


class LinearAttention(Attention):
    """Beside the other one: queries, keys and values without a softmax between."""

    def mixes(self, x: Any) -> Any:
        return torch.matmul(torch.matmul(x, x.transpose(1, 2)), x)


class ShortConvolution(Attention):
    def mixes(self, x: Any) -> Any:
        padded = torch.nn.functional.pad(x.transpose(1, 2), (2, 0))
        return torch.nn.functional.conv1d(padded, self.o.weight[:, :1, None].expand(-1, 1, 3), groups=WIDTH).mT


class SharedKeys(Attention):
    """Two attentions with the keys of one, as layers that share a cache."""

    def forward(self, x: Any, mask: Any) -> Any:
        batch, tokens, _ = x.shape
        query, key, value = (f(x).view(batch, tokens, HEADS, SIZE).transpose(1, 2) for f in (self.q, self.k, self.v))
        attend = torch.nn.functional.scaled_dot_product_attention
        first = attend(query, key, value, is_causal=True)
        second = attend(query + first, key, value, is_causal=True)
        return self.o(second.transpose(1, 2).reshape(batch, tokens, -1))


@pytest.mark.parametrize(
    ("attention", "said"),
    [
        (SharedKeys, "same keys"),
        (Unmasked, "not causal"),
        (ReadsKeys, "beside the attention"),
        (LinearAttention, "mixes tokens"),
        (ShortConvolution, "mixes tokens"),
    ],
)
def test_what_is_no_decoder_is_refused(attention: type[Attention], said: str) -> None:
    with pytest.raises(ModelFileError, match=said) as error:
        _report(attention)
    assert error.value.code == "SM126"


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_a_prompt_of_one_token_is_a_prefill(cache: str) -> None:
    """Its scores have its own key alone. The last step over as many tokens is the same, however long the prompt was."""
    one, two = (_report(prompt=prompt, new_tokens=25 - prompt, cache=cache).phases for prompt in (1, 2))
    assert one.start_bytes == two.start_bytes
    assert one.decode == two.decode
    assert one.forward.peak_bytes <= two.forward.peak_bytes
