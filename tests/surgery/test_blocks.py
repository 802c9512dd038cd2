"""The linear algebra: SVD blocks as projectors with a negative control, scale, rank, signs, fused projections."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from scale_surgery.checkpoint.expansions import tensor_name
from scale_surgery.checkpoint.folder import open_checkpoint, read_tensor
from scale_surgery.demo import SHIPPED_MODEL
from scale_surgery.deriving.planned import plan
from scale_surgery.planning.architecture import Linear
from scale_surgery.planning.request import Request
from scale_surgery.planning.specs import Widths
from scale_surgery.tensors import blocks
from scale_surgery.tensors.blocks import seeded_generator, svd_embedding, svd_w21, svd_w22
from scale_surgery.tensors.initialise import Initialiser, join_roles, split_roles
from tests.each import mostly
from tests.families import FAMILIES

SHAPES = ((48, 20), (20, 48), (30, 30))
each_shape = pytest.mark.parametrize("shape", SHAPES, ids=("tall", "wide", "square"))
each_method = pytest.mark.parametrize("method", ("exact", "fast"))
# the reference is float64; the result is cast to float32 once
PROJECTOR_TOLERANCE = 1e-5


def matrix(rows: int, columns: int, *, rank: int | None = None, decay: float = 0.8) -> Tensor:
    """A random matrix with singular values 1, decay, decay^2, ..., zero from `rank` on."""
    generator = torch.Generator().manual_seed(rows * 1000 + columns)
    small = min(rows, columns)
    left = torch.linalg.qr(torch.randn(rows, small, generator=generator, dtype=torch.float64)).Q
    right = torch.linalg.qr(torch.randn(columns, small, generator=generator, dtype=torch.float64)).Q
    values = decay ** torch.arange(small, dtype=torch.float64)
    values[rank if rank is not None else small :] = 0
    return ((left * values) @ right.T).float()


def row_space(block: Tensor) -> Tensor:
    """Projector on the rows of a block of full row rank."""
    basis = torch.linalg.qr(block.double().T).Q
    return basis @ basis.T


def generator() -> torch.Generator:
    return seeded_generator(0, "test")


def formula(weight: Tensor, r: int) -> Tensor:
    """U_r^T W of the mean norm of W's rows, in float64."""
    left, _, _ = torch.linalg.svd(weight.double(), full_matrices=False)
    rows = left[:, :r].T @ weight.double()
    return rows * (weight.double().norm(dim=1).mean() / rows.norm(dim=1).mean())


def assert_same_rows(rows: Tensor, wanted: Tensor) -> None:
    """Rows are those of the formula but for their signs, which are free."""
    signs = (rows.double() * wanted).sum(1, keepdim=True).sign()
    torch.testing.assert_close(rows.double(), wanted * signs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", (*SHAPES, (400, 160), (160, 400)), ids=lambda shape: "x".join(map(str, shape)))
@each_method
def test_w21_is_the_formula(shape, method):
    """Of the two largest, "fast" finds the range; of smaller ones it decomposes all."""
    weight, r = matrix(*shape), 6
    assert (2 * (r + blocks.OVERSAMPLING) <= min(shape)) == (max(shape) == 400)
    w21 = svd_w21(weight, r, method, generator())
    assert_same_rows(w21, formula(weight, r))
    assert (w21.gather(1, w21.abs().argmax(dim=1, keepdim=True)) > 0).all(), "ours make the largest entry positive"
    norms = w21.norm(dim=1)
    assert (norms[:-1] >= norms[1:]).all(), "by descending singular value"
    # the leading right singular vectors; negative control: not the minor ones, nor the leading ones of another rank
    right = torch.linalg.svd(weight.double()).Vh
    assert (row_space(w21) - row_space(right[:r])).abs().max() < PROJECTOR_TOLERANCE
    assert (row_space(w21) - row_space(right[-r:])).abs().max() > 0.1
    assert (row_space(w21) - row_space(right[: r + 1])).abs().max() > 0.01


@pytest.mark.parametrize(
    ("rows", "columns", "rank", "r"), ((40, 24, 4, 10), (12, 8, 8, 20), (8, 12, 8, 20)), ids=("rank", "tall", "wide")
)
@each_method
def test_rows_beyond_the_rank_are_random_of_the_mean_norm(rows, columns, rank, r, method):
    weight = matrix(rows, columns, rank=rank)
    block = svd_w21(weight, r, method, generator())
    right = torch.linalg.svd(weight.double()).Vh[:rank]
    assert (row_space(block[:rank]) - row_space(right)).abs().max() < 1e-4
    norm = weight.norm(dim=1).mean().item()
    assert block[rank:].norm(dim=1).tolist() == pytest.approx([norm] * (r - rank), rel=1e-4)
    assert block[:rank].norm(dim=1).mean().item() == pytest.approx(norm, rel=1e-4)
    assert torch.linalg.matrix_rank(block) == min(r, columns)


def test_a_zero_matrix_gives_finite_blocks():
    weight = torch.zeros(12, 8)
    for block in (
        svd_w21(weight, 4, "exact", generator()),
        svd_w22(weight, 4, 3, "exact", generator()),
        svd_embedding(weight, 4, "exact", generator()),
    ):
        assert block.isfinite().all()


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("shape", ((600, 400), (400, 600)), ids=("tall", "wide"))
@each_method
def test_equal_inputs_give_equal_bits(method, shape, dtype):
    weight = matrix(*shape, decay=0.95).to(dtype)
    for r in (8, 200):
        first, second = (svd_w21(weight.clone(), r, method, seeded_generator(3, "a")) for _ in range(2))
        assert torch.equal(first, second)
    first, flipped = (svd_w21(sign * weight, 8, method, seeded_generator(3, "a")) for sign in (1, -1))
    torch.testing.assert_close(flipped, first, rtol=0, atol=1e-5)
    # negative control: the seed is what makes the bits of "fast", not the matrix alone
    reseeded = svd_w21(weight, 8, method, seeded_generator(4, "a"))
    assert torch.equal(first, reseeded) == (method == "exact")


def test_generators_differ_by_name_and_seed_and_by_nothing_else():
    def draw(seed: int, name: str) -> list[float]:
        return torch.randn(3, generator=seeded_generator(seed, name)).tolist()

    assert draw(0, "a") == draw(0, "a")
    assert len({tuple(draw(*key)) for key in ((0, "a"), (0, "b"), (1, "a"), (-1, "a"))}) == 4


@each_shape
def test_chunks_do_not_change_the_result(monkeypatch, shape):
    weight = matrix(*shape)
    whole = [make(weight, 5, "exact", generator()) for make in (svd_w21, svd_embedding)]
    monkeypatch.setattr(blocks, "CHUNK_ELEMENTS", 64)
    for make, wanted in zip((svd_w21, svd_embedding), whole, strict=True):
        torch.testing.assert_close(make(weight, 5, "exact", generator()), wanted, rtol=0, atol=1e-6)


@each_method
def test_half_precision_is_decomposed_in_float32_or_better(method):
    weight = matrix(48, 20).bfloat16()
    wanted = svd_w21(weight.float(), 6, method, generator())
    assert torch.equal(svd_w21(weight, 6, method, generator()), wanted)
    assert wanted.dtype == torch.float32


def energy(weight: Tensor, rows: Tensor) -> float:
    """Squared norm of W on the space that rows span, in float64."""
    basis = torch.linalg.qr(rows.double().T).Q
    return float((weight.double() @ basis).square().sum())


# a matrix, and the share of the energy of an eighth of its directions that "fast" may miss
SPECTRA = {
    "random": (lambda: torch.randn(900, 600, generator=torch.Generator().manual_seed(0)), 0.05),
    "slow": (lambda: matrix(900, 600, decay=0.999), 0.1),
    "fast": (lambda: matrix(900, 600, decay=0.97), 1e-6),
    "wide": (lambda: matrix(600, 900, decay=0.995), 0.01),
    "square": (lambda: matrix(600, 600, decay=0.995), 0.01),
    "gate_proj": (lambda: shipped("mlp.gate_proj"), 1e-3),
    "q_proj": (lambda: shipped("self_attn.q_proj"), 1e-5),
    "down_proj": (lambda: shipped("mlp.down_proj"), 1e-3),
}


def shipped(name: str) -> Tensor:
    return read_tensor(open_checkpoint(SHIPPED_MODEL), f"model.layers.2.{name}.weight")


@pytest.mark.parametrize(
    ("dtype", "share"),
    mostly(
        [(dtype, share) for dtype in (torch.bfloat16, torch.float32) for share in (2, 8)],
        [(torch.float32, 8)].__contains__,
    ),
)
@pytest.mark.parametrize("kind", SPECTRA)
def test_fast_finds_nearly_all_that_exact_finds(kind, share, dtype):
    make, missed = SPECTRA[kind]
    weight = make().to(dtype)
    r = min(weight.shape) // share
    best, fast_energy = (energy(weight, svd_w21(weight, r, method, generator())) for method in ("exact", "fast"))
    # where half of the directions are wanted, the exact ones are found
    assert best * (1 - (missed if share == 8 else 1e-6)) <= fast_energy <= best * (1 + 1e-6)
    # negative control: directions by chance hold less
    assert energy(weight, torch.randn(r, weight.shape[1], generator=generator())) < 0.8 * best


@pytest.mark.parametrize("shape", (*SHAPES, (700, 530), (530, 700)))
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float32))
@each_method
def test_the_gram_matrix_is_that_of_the_dense_product(monkeypatch, shape, dtype, method):
    weight = matrix(*shape, decay=0.999).to(dtype)
    long = weight if shape[0] >= shape[1] else weight.T
    wanted = long.double().T @ long.double()
    # of float32 sums of so many products, where it goes up as often as down; their order is the processor's
    rounding = max(shape) ** 0.5 * torch.finfo(torch.float32).eps
    monkeypatch.setattr(blocks, "CHUNK_ELEMENTS", 100_000)
    for columns in (7, blocks.GRAM_COLUMNS):
        monkeypatch.setattr(blocks, "GRAM_COLUMNS", columns)
        product = blocks.gram(weight, method)
        error = (product - wanted).abs().max() / wanted.abs().max()
        assert error < (rounding if method == "fast" else 1e-14)
        assert torch.equal(product.triu(columns), product.tril(-columns).T), "what is below is a copy of what is above"
    # negative control: what bfloat16 rounds, the weights of other dtypes and all sums, is far off
    rounded = long.bfloat16().T @ long.bfloat16()
    assert (rounded - wanted).abs().max() / wanted.abs().max() > 1e-4


def test_the_precision_of_products_is_as_before():
    products = getattr(torch.backends.mkldnn, "matmul", None)
    if products is None:
        pytest.skip("this PyTorch has one precision")
    before = products.fp32_precision
    blocks.gram(matrix(48, 20).bfloat16(), "fast")
    assert products.fp32_precision == before
    with pytest.raises(ZeroDivisionError), blocks._bfloat16_products(torch.bfloat16):
        assert products.fp32_precision == "bf16"
        raise ZeroDivisionError
    assert products.fp32_precision == before
    for dtype in (torch.float16, torch.float32, torch.float64):
        with blocks._bfloat16_products(dtype):
            assert products.fp32_precision == before


@pytest.mark.parametrize("decay", (0.99, 0.7))
@each_method
def test_the_norm_of_a_row_is_that_of_its_image(decay, method):
    weight, r = matrix(90, 60, decay=decay), 40
    rows = blocks.principal_rows(weight, r, method, generator()).double()
    norms = rows.norm(dim=1)
    images = (weight.double() @ (rows / norms[:, None]).T).norm(dim=0)
    torch.testing.assert_close(norms, images, rtol=5e-4, atol=0)
    # negative control: of small singular values, the squares are lost in the rounding of the largest
    roots = torch.linalg.eigvalsh(blocks.gram(weight, "fast")).flip(0)[:r].clamp_min(0).sqrt().double()
    assert torch.allclose(roots, images, rtol=5e-4, atol=0) == (decay == 0.99)


def test_w22_is_the_diagonal_of_singular_values():
    weight = matrix(48, 20)
    block = svd_w22(weight, 5, 7, "exact", generator())
    values = torch.linalg.svdvals(weight.double())[:5]
    assert block.shape == (5, 7)
    assert torch.equal(block[:, :5], block[:, :5].diag().diag()), "diagonal"
    assert not block[:, 5:].any()
    scale = weight.norm(dim=1).mean().double() / values.mean()
    torch.testing.assert_close(block[:, :5].diag().double(), values * scale, rtol=1e-5, atol=0)


@pytest.mark.parametrize("shape", ((60, 20), (20, 60)), ids=("large_vocabulary", "small_vocabulary"))
@each_method
def test_embedding_columns_are_the_leading_coordinates_of_the_tokens(shape, method):
    weight, up = matrix(*shape), 6
    right = torch.linalg.svd(weight.double(), full_matrices=False).Vh
    columns = svd_embedding(weight, up, method, generator())
    assert columns.shape == (shape[0], up)
    assert columns.norm(dim=1).mean().item() == pytest.approx(weight.norm(dim=1).mean().item(), rel=1e-4)
    wanted = row_space((weight.double() @ right[:up].T).T)
    assert (row_space(columns.T) - wanted).abs().max() < 1e-4
    assert (row_space(columns.T) - row_space((weight.double() @ right[-up:].T).T)).abs().max() > 0.1


def test_embedding_columns_beyond_the_rank_are_zero():
    columns = svd_embedding(matrix(30, 6), 9, "exact", generator())
    assert columns.shape == (30, 9)
    assert columns[:, :6].any(dim=0).all()
    assert not columns[:, 6:].any()


def test_he_initialisation_has_its_spread():
    block = blocks.random_block(300, 200, generator())
    assert block.std().item() == pytest.approx((2 / 200) ** 0.5, rel=0.02)
    assert abs(block.mean().item()) < 1e-3


# rows of a projection whose keys and values are shared: the queries of a key, the key, the value, and so on
GROUPED = Linear("attention.query_key_value", ("q", "k", "v"), 40, (80, 20, 20), "head")


def rows_by_hand(groups: int) -> list[list[int]]:
    """Rows of q, k and v where each key/value head of size 10 stands behind its four query heads."""
    rows: list[list[int]] = [[], [], []]
    row = 0
    for _ in range(groups):
        for role, heads in enumerate((4, 1, 1)):
            rows[role] += range(row, row + heads * 10)
            row += heads * 10
    return rows


@pytest.mark.parametrize(
    ("linear", "size", "wanted"),
    (
        # two heads of size 2; rows numbered: q0 q0 k0 k0 v0 v0 q1 q1 k1 k1 v1 v1
        (FAMILIES["gpt_neox"].linears[0], 2, [[0, 1, 6, 7], [2, 3, 8, 9], [4, 5, 10, 11]]),
        (FAMILIES["phi3"].linears[0], 2, [[0, 1, 2, 3], [4, 5], [6, 7]]),
        (FAMILIES["llama"].linears[0], 2, [[0, 1, 2, 3]]),
        *((GROUPED, 10, rows_by_hand(groups)) for groups in (1, 2, 3)),
    ),
    ids=("gpt_neox", "phi3", "llama", "one group", "two groups", "three groups"),
)
def test_fused_projections_are_taken_apart_and_put_together(linear, size, wanted):
    rows = [len(indices) for indices in wanted]
    weight = torch.arange(sum(rows) * 5).view(-1, 5)
    parts = split_roles(weight, linear, size, rows)
    assert all(torch.equal(part, weight[indices]) for part, indices in zip(parts, wanted, strict=True))
    assert torch.equal(join_roles(parts, linear, size), weight)


@pytest.mark.parametrize(
    ("name", "fused"),
    (("gpt_neox", "attention.query_key_value"), ("phi3", "self_attn.qkv_proj"), ("gpt2", "attn.c_attn")),
)
def test_each_role_is_decomposed_by_itself(base_of, name, fused):
    base = base_of(name)
    made, checkpoint = plan(base, Request("1", svd="exact")), open_checkpoint(base)
    tensor = next(t for t in made.tensors if t.name.endswith(tensor_name(fused, "default", "w21")))
    block, weight = Initialiser(made, checkpoint).make(tensor), read_tensor(checkpoint, tensor.source)
    weight = weight.T if name == "gpt2" else weight
    linear = next(linear for linear in made.architecture.kinds[0].blocks[0].linears if linear.name == fused)
    size, new = made.sizes.head_size, made.widths.up_kv_heads
    added = split_roles(block, linear, size, [new * made.sizes.queries_per_key_value * size, new * size, new * size])
    for part, up in zip(split_roles(weight, linear, size), added, strict=True):
        assert_same_rows(up, formula(part, len(up)))
        whole = formula(weight, len(up))
        assert (row_space(up) - row_space(whole)).abs().max() > 0.01, "the control: not all roles at once"


@pytest.mark.parametrize("groups", (1, 2))
def test_grouped_heads_are_decomposed_by_role(base_of, groups):
    """The same rows as of the tiny GPT-NeoX, read as 8 query heads that share 2 keys and values."""
    base = base_of("gpt_neox")
    made = plan(base, Request("1", svd="exact"))
    kind, checkpoint = made.architecture.kinds[0], open_checkpoint(base)
    facts = {"query_heads": 8, "key_value_heads": 2, "head_size": 10}
    block = replace(kind.blocks[0], linears=(GROUPED, kind.blocks[0].linears[1]), **facts)
    architecture = replace(made.architecture, kinds=(replace(kind, blocks=(block, *kind.blocks[1:])),))
    grouped = replace(made, facts=replace(made.facts, architecture=architecture), widths=Widths(40, groups, 8))
    tensor = next(
        tensor for tensor in made.tensors if tensor.name.endswith(tensor_name("query_key_value", "default", "w21"))
    )
    w21 = Initialiser(grouped, checkpoint).make(replace(tensor, shape=(groups * 60, 40)))
    weight = read_tensor(checkpoint, tensor.source)
    for old, new in zip(rows_by_hand(2), rows_by_hand(groups), strict=True):
        wanted = formula(weight[old], len(new))
        assert_same_rows(w21[new[: len(wanted)]], wanted)
