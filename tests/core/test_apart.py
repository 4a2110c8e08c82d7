"""Operations on several streams at once that give each stream the bits that it gets alone."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tribe.core.apart import BY_PLACE, IN_PLACE, Apart

S = 5  # streams
DRAW = torch.Generator().manual_seed(0)


def draw(*shape):
    return torch.randn(shape, generator=DRAW)


WEIGHT, FILTERS = draw(7, 48), draw(6, 3, 3, 3)
CASES = {
    "one image a stream": (lambda x: F.conv2d(x, FILTERS, padding=1), draw(S, 3, 9, 9)),
    "a convolution with other settings": (lambda x: torch.conv2d(x, FILTERS, None, 2, 1), draw(3 * S, 3, 9, 9)),
    "same padding": (lambda x: F.conv2d(x, FILTERS, padding="same"), draw(S, 3, 9, 9)),
    "1x1": (lambda x: F.conv2d(x, FILTERS[:, :, :1, :1]), draw(2 * S, 3, 9, 9)),
    "1d": (lambda x: F.conv1d(x, FILTERS[:, :, 0]), draw(S, 3, 33)),
    "transposed": (lambda x: F.conv_transpose2d(x, FILTERS.transpose(0, 1)), draw(S, 3, 9, 9)),
    "linear": (lambda x: F.linear(x, WEIGHT), draw(S, 48)),
    "linear on tokens": (lambda x: F.linear(x, WEIGHT), draw(2 * S, 3, 48)),
    "rows by a matrix": (lambda x: x @ WEIGHT.mT, draw(2 * S, 48)),
    "tokens by a matrix": (lambda x: x.matmul(WEIGHT.mT), draw(S, 3, 48)),
    "a batch of products": (lambda x: torch.bmm(x, x.mT), draw(S, 3, 48)),
    "attention": (lambda x: F.scaled_dot_product_attention(*x.chunk(3, 1)), draw(S, 6, 7, 8)),
    "norms": (lambda x: torch.linalg.vector_norm(x, dim=1), draw(S, 77)),
    "sigmoid": (torch.sigmoid, draw(S, 7)),
    "sigmoid in place": (lambda x: x.clone().sigmoid_(), draw(S, 7)),
    "silu": (F.silu, draw(S, 3, 7)),
    "a layer in place": (lambda x: nn.SiLU(inplace=True)(x.clone()), draw(S, 3, 7)),
    "softplus": (F.softplus, draw(S, 13)),
    "a power": (lambda x: x.abs() ** 2.3, draw(S, 7)),
    "a power of a number": (lambda x: torch.pow(0.3, x), draw(S, 7)),
    "a power in place": (lambda x: x.abs().pow_(2.3), draw(S, 7)),
    "powers of each stream": (lambda x: x.abs().pow(x[:, :1]), draw(S, 7)),
    "powers for all": (lambda x: x.abs().pow(WEIGHT[0, :7].abs()), draw(S, 7)),
    "one operation after another": (lambda x: F.silu(F.conv2d(x, FILTERS)).mean((2, 3)).sigmoid(), draw(S, 3, 9, 9)),
}


def parts(x):
    return [part.clone() for part in x.chunk(S)]


@pytest.mark.parametrize("name", CASES)
def test_each_stream_gets_the_bits_that_it_gets_alone(name):
    work, x = CASES[name]
    with Apart(S):
        together = work(x.clone())
    assert torch.equal(together, torch.cat([work(part) for part in parts(x)]))
    assert torch.allclose(together, work(x.clone()), atol=1e-5), "the same function"


@pytest.mark.parametrize("name", [name for name in CASES if "in place" not in name])
def test_and_the_bits_of_its_gradient(name):
    work, x = CASES[name]

    def gradient(x):
        leaf = x.requires_grad_()
        y = work(leaf)
        shares = torch.linspace(-1, 1, y[0].numel()).view_as(y[0])
        return torch.autograd.grad((y * shares).sum(), leaf)[0]

    with Apart(S):
        together = gradient(x.clone())
    assert torch.equal(together, torch.cat([gradient(part) for part in parts(x)]))


def test_without_it_bits_depend_on_the_size_of_the_batch():
    """Otherwise these tests could not fail."""
    alone = {name: torch.cat([work(part) for part in parts(x)]) for name, (work, x) in CASES.items()}
    assert any(not torch.equal(work(x.clone()), alone[name]) for name, (work, x) in CASES.items())


@pytest.mark.parametrize(
    ("work", "shape"),
    [
        (lambda x: F.conv2d(x, draw(6, S, 3, 3)), (S, 9, 9)),  # one image: its first axis has channels
        (lambda x: F.linear(x, draw(3, S)), (S,)),
        (lambda x: draw(3, S) @ x, (S, 2)),  # its first axis is summed over
        (lambda x: torch.linalg.vector_norm(x), (S, 7)),
        (lambda x: torch.linalg.vector_norm(x, dim=0), (S, 7)),
        (lambda x: draw(2, 3, S) @ x, (S, 4)),
        (lambda x: x.sigmoid(), (S + 1, 7)),
        (lambda x: x.sigmoid(), ()),
        (lambda x: x[:0].sigmoid(), (S, 7)),
        (lambda x: 2.0**x, ()),
    ],
)
def test_an_axis_that_is_not_of_streams_is_not_split(work, shape):
    x = draw(*shape)
    DRAW.manual_seed(1)
    with Apart(S):
        found = work(x)
    DRAW.manual_seed(1)
    assert torch.allclose(found, work(x), atol=1e-5)


def test_weights_that_learn_have_their_gradients():
    layer, x = nn.Conv2d(3, 6, 3), draw(S, 3, 9, 9)
    expected = torch.autograd.grad(layer(x).square().sum(), layer.weight)[0]
    with Apart(S):
        found = torch.autograd.grad(layer(x).square().sum(), layer.weight)[0]
    assert torch.allclose(found, expected, rtol=1e-4)


def test_in_place_functions_change_their_argument():
    x = draw(S, 7)
    expected, given = x.sigmoid(), x.clone()
    with Apart(S):
        assert given.sigmoid_() is given
    assert torch.allclose(given, expected)
    assert IN_PLACE < BY_PLACE
    assert Tensor.sigmoid_ in IN_PLACE
