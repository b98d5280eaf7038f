"""Architectures that torchvision lacks, for the shipped traces: shapes only, never trained here.

Inception-v4 ("Inception-v4, Inception-ResNet and the Impact of Residual Connections on Learning",
AAAI'17), BERT-Base with its pre-training heads ("BERT", NAACL'19), and the base Transformer
("Attention Is All You Need", NIPS'17) with one embedding matrix for both inputs and the output.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Pair = tuple[int, int]


class ConvNorm(nn.Sequential):
    """Convolution without bias, batch norm, ReLU; odd kernels keep the size unless `valid`."""

    def __init__(
        self, inputs: int, outputs: int, kernel: int | Pair, stride: int = 1, valid: bool = False
    ) -> None:
        size = (kernel, kernel) if isinstance(kernel, int) else kernel
        padding = (0, 0) if valid else (size[0] // 2, size[1] // 2)
        super().__init__(
            nn.Conv2d(inputs, outputs, size, stride, padding, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
        )


class Branches(nn.Module):
    """Several paths over the same input [B, C, H, W], joined along the channels."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self.branches], dim=1)


def _chain(inputs: int, *layers: tuple[int, int | Pair]) -> nn.Sequential:
    """ConvNorms one after the other: (outputs, kernel) each."""
    found = []
    for outputs, kernel in layers:
        found.append(ConvNorm(inputs, outputs, kernel))
        inputs = outputs
    return nn.Sequential(*found)


def _shrink(inputs: int, *layers: tuple[int, int | Pair]) -> nn.Sequential:
    """The same, the last layer with stride 2 and no padding."""
    *keep, (outputs, kernel) = layers
    before = keep[-1][0] if keep else inputs
    return nn.Sequential(*_chain(inputs, *keep), ConvNorm(before, outputs, kernel, 2, valid=True))


def _pooled(inputs: int, outputs: int) -> nn.Sequential:
    pool = nn.AvgPool2d(3, stride=1, padding=1, count_include_pad=False)
    return nn.Sequential(pool, ConvNorm(inputs, outputs, 1))


def _stem() -> Iterable[nn.Module]:
    yield ConvNorm(3, 32, 3, 2, valid=True)
    yield ConvNorm(32, 32, 3, valid=True)
    yield ConvNorm(32, 64, 3)
    yield Branches(nn.MaxPool2d(3, 2), ConvNorm(64, 96, 3, 2, valid=True))
    yield Branches(
        nn.Sequential(ConvNorm(160, 64, 1), ConvNorm(64, 96, 3, valid=True)),
        nn.Sequential(
            _chain(160, (64, 1), (64, (1, 7)), (64, (7, 1))), ConvNorm(64, 96, 3, 1, True)
        ),
    )
    yield Branches(ConvNorm(192, 192, 3, 2, valid=True), nn.MaxPool2d(3, 2))


def _inception_a() -> nn.Module:
    return Branches(
        ConvNorm(384, 96, 1),
        _chain(384, (64, 1), (96, 3)),
        _chain(384, (64, 1), (96, 3), (96, 3)),
        _pooled(384, 96),
    )


def _inception_b() -> nn.Module:
    return Branches(
        ConvNorm(1024, 384, 1),
        _chain(1024, (192, 1), (224, (1, 7)), (256, (7, 1))),
        _chain(1024, (192, 1), (192, (7, 1)), (224, (1, 7)), (224, (7, 1)), (256, (1, 7))),
        _pooled(1024, 128),
    )


def _inception_c() -> nn.Module:
    wide, tall = (1, 3), (3, 1)
    return Branches(
        ConvNorm(1536, 256, 1),
        nn.Sequential(
            ConvNorm(1536, 384, 1), Branches(ConvNorm(384, 256, wide), ConvNorm(384, 256, tall))
        ),
        nn.Sequential(
            _chain(1536, (384, 1), (448, tall), (512, wide)),
            Branches(ConvNorm(512, 256, wide), ConvNorm(512, 256, tall)),
        ),
        _pooled(1536, 256),
    )


class InceptionV4(nn.Sequential):
    """Inception-v4: images [B, 3, 299, 299] -> logits [B, 1000]."""

    def __init__(self) -> None:
        super().__init__(
            *_stem(),
            *(_inception_a() for _ in range(4)),
            Branches(
                ConvNorm(384, 384, 3, 2, valid=True),
                _shrink(384, (192, 1), (224, 3), (256, 3)),
                nn.MaxPool2d(3, 2),
            ),
            *(_inception_b() for _ in range(7)),
            Branches(
                _shrink(1024, (192, 1), (192, 3)),
                _shrink(1024, (256, 1), (256, (1, 7)), (320, (7, 1)), (320, 3)),
                nn.MaxPool2d(3, 2),
            ),
            *(_inception_c() for _ in range(3)),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(1536, 1000),
        )


class Attention(nn.Module):
    """Multi-head attention of x [B, T, width] on source [B, S, width] (x itself if not given)."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.query, self.key, self.value, self.output = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor, source: Tensor | None = None) -> Tensor:
        source = x if source is None else source
        query, key, value = (
            layer(of).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)  # [B, heads, T, width']
            for layer, of in ((self.query, x), (self.key, source), (self.value, source))
        )
        weights = (query @ key.transpose(-2, -1)).softmax(-1)
        mixed: Tensor = self.output((weights @ value).transpose(1, 2).flatten(2))
        return mixed


class Block(nn.Module):
    """Attention, (attention on a source,) feed-forward; each added to its input and normalised."""

    def __init__(self, width: int, num_heads: int, inner: int, with_source: bool) -> None:
        super().__init__()
        self.attention = Attention(width, num_heads)
        self.attention_norm = nn.LayerNorm(width)
        self.source_attention = Attention(width, num_heads) if with_source else None
        self.source_norm = nn.LayerNorm(width) if with_source else None
        self.inner, self.outer = nn.Linear(width, inner), nn.Linear(inner, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor, source: Tensor | None = None) -> Tensor:
        x = self.attention_norm(x + self.attention(x))
        if self.source_attention is not None and self.source_norm is not None:
            x = self.source_norm(x + self.source_attention(x, source))
        result: Tensor = self.norm(x + self.outer(F.gelu(self.inner(x))))
        return result


def _through(blocks: Iterable[nn.Module], x: Tensor, source: Tensor | None = None) -> Tensor:
    for block in blocks:
        x = block(x, source)
    return x


class BertBase(nn.Module):
    """BERT-Base and its two pre-training heads; the output projection is the word embedding.

    tokens [B, T] int64 -> logits of words [B, T, 30522], of the next sentence [B, 2].
    """

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(30522, 768)
        self.positions = nn.Embedding(512, 768)
        self.segments = nn.Embedding(2, 768)
        self.norm = nn.LayerNorm(768)
        self.blocks = nn.ModuleList(Block(768, 12, 3072, with_source=False) for _ in range(12))
        self.pooler = nn.Linear(768, 768)
        self.transform = nn.Linear(768, 768)
        self.transform_norm = nn.LayerNorm(768)
        self.word_bias = nn.Parameter(torch.zeros(30522))
        self.next_sentence = nn.Linear(768, 2)

    def forward(self, tokens: Tensor) -> Sequence[Tensor]:
        position = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.words(tokens) + self.positions(position) + self.segments(torch.zeros_like(tokens))
        x = _through(self.blocks, self.norm(x))
        pooled = self.pooler(x[:, 0]).tanh()
        x = self.transform_norm(F.gelu(self.transform(x)))
        return F.linear(x, self.words.weight, self.word_bias), self.next_sentence(pooled)


class Transformer(nn.Module):
    """The base Transformer: source and target tokens [B, T] int64 -> logits [B, T, 37000]."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(37000, 512)
        self.encoder = nn.ModuleList(Block(512, 8, 2048, with_source=False) for _ in range(6))
        self.decoder = nn.ModuleList(Block(512, 8, 2048, with_source=True) for _ in range(6))

    def forward(self, tokens: Tensor) -> Sequence[Tensor]:
        source = _through(self.encoder, self.words(tokens))
        x = _through(self.decoder, self.words(tokens), source)
        return (F.linear(x, self.words.weight),)
