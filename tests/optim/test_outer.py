"""The outer optimizer, driven by hand: no processes, no model."""

import math
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from moefold.comm.wire_codes import make_wire_code
from moefold.config.sites import SitesConfig
from moefold.launch.site_round import pair_members
from moefold.optim.outer import OuterOptimizer
from moefold.optim.outer_round import PendingRound, add_pull, bits_to_float, float_to_bits
from moefold.optim.states import StateStore
from moefold.train.callbacks.sites import mean_square

SHAPES = {"a": (3, 4), "b": (5,), "empty": (0, 2), "c": ()}
BUFFERS = {"bias": torch.tensor([0.5, -1.0]), "counts": torch.tensor([3, 4])}


class Site:
    """The parameters of a site, a linear regression on its own samples, and the outer optimizer."""

    def __init__(self, settings: SitesConfig, dtype: torch.dtype = torch.float64, seed: int = 0) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.parameters = {
            name: nn.Parameter(torch.randn(shape, dtype=dtype, generator=draw)) for name, shape in SHAPES.items()
        }
        self.buffers = {name: buffer.clone() for name, buffer in BUFFERS.items()}
        self.outer = OuterOptimizer(self.parameters, self.buffers, settings, StateStore())
        self.outer.start()

    def move(self, gradients: dict[str, Tensor], lr: float = 0.1) -> None:
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.sub_(lr * gradients[name])

    def flat(self) -> Tensor:
        return torch.cat([p.detach().flatten() for p in self.parameters.values()])


def gradients(site: int, step: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(1000 * site + step)
    return {name: torch.randn(shape, dtype=torch.float64, generator=draw) for name, shape in SHAPES.items()}


def exchange(sites: list[Site]) -> None:
    own = [site.outer.difference() for site in sites]
    mean = torch.zeros_like(own[0])
    for values in own:
        mean.add_(values, alpha=1 / len(sites))
    for site, values in zip(sites, own, strict=True):
        site.outer.step(values, mean)


@pytest.mark.parametrize("count", [2, 3, 4])
def test_mean_of_sgd_steps_is_a_step_on_the_joined_batch(count):
    """With SGD inside and a round after each step, the sites are one job whose gradient is the mean of theirs."""
    sites = [Site(SitesConfig(count=count)) for _ in range(count)]
    joined = Site(SitesConfig(count=count))
    for step in range(20):
        for number, site in enumerate(sites):
            site.move(gradients(number, step))
        exchange(sites)
        each = [gradients(number, step) for number in range(count)]
        joined.move({name: sum(g[name] for g in each) / count for name in SHAPES})
    for site in sites:
        assert torch.equal(site.flat(), sites[0].flat())
        torch.testing.assert_close(site.flat(), joined.flat(), rtol=1e-12, atol=1e-12)


def test_mean_of_adam_steps_is_no_step_of_the_mean_gradient():
    """The control of the test above: an inner optimizer that is not linear in the gradient differs."""
    sites = [Site(SitesConfig(count=2)) for _ in range(2)]
    joined = Site(SitesConfig(count=2))
    for number, site in enumerate(sites):
        site.move({name: g.sign() for name, g in gradients(number, 0).items()})
    exchange(sites)
    joined.move({name: (gradients(0, 0)[name] + gradients(1, 0)[name]).sign() for name in SHAPES})
    assert (sites[0].flat() - joined.flat()).abs().max() > 0.05


@pytest.mark.parametrize("nesterov", [True, False])
def test_momentum_equals_torch_sgd(nesterov):
    settings = SitesConfig(count=2, lr=0.7, momentum=0.9, nesterov=nesterov)
    sites = [Site(settings) for _ in range(2)]
    reference = [nn.Parameter(p.detach().clone()) for p in sites[0].parameters.values()]
    sgd = torch.optim.SGD(reference, lr=0.7, momentum=0.9, nesterov=nesterov)
    for round_ in range(5):
        before = [p.detach().clone() for p in sites[0].parameters.values()]
        for number, site in enumerate(sites):
            site.move(gradients(number, round_))
        moved = [[p.detach().clone() for p in site.parameters.values()] for site in sites]
        exchange(sites)
        for parameter, phi, *theta in zip(reference, before, *moved, strict=True):
            parameter.grad = torch.zeros_like(phi)
            for values in theta:
                parameter.grad.add_(phi - values, alpha=0.5)
        sgd.step()
        for ours, theirs in zip(sites[0].parameters.values(), reference, strict=True):
            assert torch.equal(ours, theirs)
    assert torch.equal(sites[0].flat(), sites[1].flat())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_round_of_one_site_with_the_plain_mean_changes_no_bit(dtype):
    site = Site(SitesConfig(count=2), dtype)
    site.move({name: 1e3 * g.to(dtype) for name, g in gradients(0, 0).items()})
    before = site.flat().clone()
    own = site.outer.difference()
    site.outer.step(own, own)
    assert torch.equal(site.flat(), before)
    assert torch.equal(torch.cat([w.flatten() for w in site.outer.weights.values()]), before)


def test_sites_with_the_same_samples_stay_one_site():
    sites = [Site(SitesConfig(count=4)) for _ in range(4)]
    alone = Site(SitesConfig(count=4))
    for step in range(12):
        for site in (*sites, alone):
            site.move(gradients(0, step))
        if step % 3 == 2:
            exchange(sites)
    torch.testing.assert_close(sites[0].flat(), alone.flat(), rtol=4 * 2**-52, atol=4 * 2**-52)


def test_rounds_that_are_not_applied_are_one_longer_round():
    """`difference` changes nothing, so that the next round sends the longer drift."""
    sites, rare = ([Site(SitesConfig(count=2)) for _ in range(2)] for _ in range(2))
    for step in range(4):
        for group in (sites, rare):
            for number, site in enumerate(group):
                site.move(gradients(number, step))
        for site in sites:
            site.outer.difference()
    exchange(sites)
    exchange(rare)
    assert torch.equal(sites[0].flat(), rare[0].flat())


def test_floating_point_buffers_are_averaged_and_counts_stay():
    sites = [Site(SitesConfig(count=2)) for _ in range(2)]
    sites[1].buffers["bias"].copy_(torch.tensor([1.5, 3.0]))
    sites[1].buffers["counts"].copy_(torch.tensor([7, 8]))
    exchange(sites)
    assert sites[0].buffers["bias"].tolist() == sites[1].buffers["bias"].tolist() == [1.0, 1.0]
    assert sites[0].buffers["counts"].tolist() == [3, 4]
    assert sites[1].buffers["counts"].tolist() == [7, 8]


def test_norms_count_each_logical_element_once():
    site = Site(SitesConfig(count=2))
    other = OuterOptimizer(site.parameters, {}, SitesConfig(count=2), StateStore(), replicas={"a": 2, "b": 0})
    other.start()
    site.move(gradients(0, 0), lr=1.0)
    own = other.difference()
    norms = other.step(own, 0.5 * own)
    found = gradients(0, 0)
    expected = float(found["a"].square().sum() / 2 + found["c"].square())
    assert math.isclose(norms.difference, expected, rel_tol=1e-12)
    assert math.isclose(norms.mean, expected / 4, rel_tol=1e-12)
    assert math.isclose(norms.product, expected / 2, rel_tol=1e-12)


def test_entries_restore_the_state():
    settings = SitesConfig(count=2, lr=0.7, momentum=0.9)
    sites = [Site(settings) for _ in range(2)]
    for number, site in enumerate(sites):
        site.move(gradients(number, 0))
    exchange(sites)
    resumed = Site(settings, seed=5)
    for name, parameter in resumed.parameters.items():
        parameter.data.copy_(sites[0].parameters[name])
    sites[0].outer.num_rounds = 1

    def load(entries):
        for name, tensor in entries.items():
            tensor.copy_(sites[0].outer.checkpoint_entries()[name])

    resumed.outer.restore(sites[0].outer.state(), load, lambda step: (0,))
    assert resumed.outer.num_rounds == 1
    for site in (sites[0], resumed):
        site.move(gradients(0, 1))
    assert torch.equal(resumed.outer.difference(), sites[0].outer.difference())
    for site in (sites[0], resumed):
        site.outer.step(site.outer.difference(), torch.linspace(-1, 1, 20, dtype=torch.float64))
    assert torch.equal(resumed.flat(), sites[0].flat())


@pytest.mark.parametrize("broken", ["sign", "sum", "momentum not saved", "weights stay"])
def test_a_wrong_outer_step_is_noticed(broken):
    """The tests above would fail for each of these."""
    settings = SitesConfig(count=2, lr=0.7, momentum=0.9)
    right, wrong = ([Site(settings) for _ in range(2)] for _ in range(2))
    for round_ in range(2):
        for group in (right, wrong):
            for number, site in enumerate(group):
                site.move(gradients(number, round_))
        exchange(right)
        own = [site.outer.difference() for site in wrong]
        mean = (own[0] + own[1]) / {"sign": -2, "sum": 1}.get(broken, 2)
        for site, values in zip(wrong, own, strict=True):
            before = site.flat().clone()
            if broken == "momentum not saved":
                for tensor in site.outer.entries(("momentum",)).values():
                    tensor.zero_()
            site.outer.step(values, mean)
            if broken == "weights stay":
                for parameter, part in zip(site.parameters.values(), before.split([12, 5, 0, 1]), strict=True):
                    parameter.data.copy_(part.view_as(parameter))
    assert (right[0].flat() - wrong[0].flat()).abs().max() > 1e-3


def in_blocks(tensors: Iterable[Tensor], block: int) -> Tensor:
    """Tensors as they are in the vector of a round: each with zeros up to a whole block of the code."""
    return torch.cat([functional.pad(t.flatten(), (0, -t.numel() % block)) for t in tensors])


CODES: list[dict[str, Any]] = [
    *({"precision": precision} for precision in ("bfloat16", "int8", "fp4")),
    *({"density": 1 / 1024, "values": bits} for bits in (32, 8, 2)),
]


@pytest.mark.parametrize("code_keys", CODES[1:], ids=str)
def test_ranks_with_the_same_shard_decode_the_same_values(code_keys):
    """Ranks hold other shards of one parameter, and the same of the next: the code of the first must not matter."""
    decoded = []
    for rank in range(2):
        parameters = {"sharded": torch.full((5,), 10.0**rank), "replicated": torch.arange(1.0, 8.0)}
        outer = OuterOptimizer(
            {name: nn.Parameter(tensor) for name, tensor in parameters.items()},
            {},
            SitesConfig(count=2, residual=0.5, **code_keys),
            StateStore(),
        )
        own = outer.difference()
        code = outer.code
        outer.keep_residual((0,), own, code.decode(code.encode(own), own))
        decoded.append(outer.residual["replicated"])
    assert decoded[0].any()
    assert torch.equal(*decoded)


def test_weights_that_are_not_finite_leave_nothing_behind():
    """A site whose weights are damaged sends them, is not read, and takes the outer weights of the others."""
    settings = SitesConfig(count=2, precision="int8", residual=0.5, overlap=1, keep_local=0.5)
    site = Site(settings)
    code = make_wire_code("int8", torch.float64)
    with torch.no_grad():
        site.parameters["a"][0, 0] = math.nan
    own = site.outer.difference()
    num_coded = site.outer.num_coded((0,))
    decoded = own.clone()
    decoded[:num_coded] = code.decode(code.encode(own[:num_coded]), own[:num_coded])
    site.outer.keep_residual((0,), own, decoded)
    site.outer.step(own, torch.zeros_like(own), keep_local=0.5)
    assert site.flat().isfinite().all()
    assert all(e.isfinite().all() for e in site.outer.residual.values())
    assert site.parameters["a"][0, 0] == site.outer.weights["a"][0, 0]


@pytest.mark.parametrize("code_keys", CODES, ids=str)
@pytest.mark.parametrize("beta", [1.0, 0.9])
def test_residual_keeps_what_codes_lose(code_keys, beta):
    """All that was sent, plus the residual at the end, is all that was to be sent, each part decayed since."""
    site = Site(SitesConfig(count=2, residual=beta, **code_keys))
    code = site.outer.code
    num_coded = site.outer.num_coded((0,))
    sent_total = torch.zeros(num_coded, dtype=torch.float64)
    due_total = torch.zeros(num_coded, dtype=torch.float64)
    for round_ in range(6):
        site.move(gradients(0, round_))
        due = in_blocks([w - site.parameters[n].detach() for n, w in site.outer.weights.items()], code.block)
        value = site.outer.difference()
        residual = in_blocks(site.outer.residual.values(), code.block)
        torch.testing.assert_close(value[:num_coded], due + beta * residual, rtol=1e-14, atol=1e-14)
        assert torch.equal(value, site.outer.difference())
        decoded = value.clone()
        decoded[:num_coded] = code.decode(code.encode(value[:num_coded]), value[:num_coded])
        if round_ == 3:
            # A round that is not applied leaves the residual, and the next one sends the longer difference.
            continue
        site.outer.keep_residual((0,), value, decoded)
        site.outer.step(value, decoded)
        sent_total = beta * sent_total + decoded[:num_coded]
        due_total = beta * due_total + due
    residual = in_blocks(site.outer.residual.values(), code.block)
    lost = float(residual.abs().max())
    assert lost > 0
    torch.testing.assert_close(sent_total + residual, due_total, rtol=1e-12, atol=1e-12)


def test_fragments_are_exchanged_apart():
    parameters = {f"layers.{i}.w": nn.Parameter(torch.full((2,), float(i))) for i in range(4)}
    parameters["embedding.weight"] = nn.Parameter(torch.zeros(3))
    buffers = {"layers.2.ffn.router.expert_bias": torch.ones(2)}
    settings = SitesConfig(count=2, fragment_layers=2, overlap=1, keep_local=0.5)
    outer = OuterOptimizer(parameters, buffers, settings, StateStore(), num_fragments=2)
    outer.start()
    with torch.no_grad():
        for parameter in parameters.values():
            parameter.add_(1.0)
    own = outer.difference((0,))
    assert (len(own), outer.num_coded((0,))) == (6, 4)
    assert own.tolist() == [-1.0] * 4 + [1.0, 1.0]
    outer.step(own, 2 * own, (0,), keep_local=0.5)
    # phi moves by 2; half of what the site has moved by itself stays.
    assert [float(outer.weights[f"layers.{i}.w"][0]) for i in range(4)] == [2.0, 1.0, 4.0, 3.0]
    assert [float(parameters[f"layers.{i}.w"].detach()[0]) for i in range(4)] == [1.5, 2.0, 3.5, 4.0]
    assert buffers["layers.2.ffn.router.expert_bias"].tolist() == [1.5, 1.5]
    assert outer.difference((1,)).tolist() == [-1.0] * 7


NOLOCO = SitesConfig(count=4, topology="pairs", lr=0.7, momentum=0.5, nesterov=False)


def exchange_in_pairs(sites: list[Site], pairs: list[tuple[int, ...]], pull_sign: float = 1.0) -> None:
    for pair in pairs:
        own = [sites[number].outer.difference() for number in pair]
        outer = [sites[number].outer.outer_vector((0,)) for number in pair]
        mean = sum((torch.cat(parts) / 2 for parts in zip(own, outer, strict=True)), torch.zeros(()))
        for number, values, phi in zip(pair, own, outer, strict=True):
            pulled = add_pull(mean, phi)
            if pull_sign < 0:
                pulled = 2 * mean[: len(pulled)] - pulled
            sites[number].outer.step(values, pulled)


@pytest.mark.parametrize("pull_sign", [1.0, -1.0])
def test_pairs_take_the_step_of_noloco(pull_sign):
    """delta = a delta + (b/n) sum(theta - phi) - g (phi - mean(phi)); phi = phi + delta, with b = g as in its code.

    Negative control: with the other sign of the pull, the outer weights differ.
    """
    sites = [Site(NOLOCO) for _ in range(4)]
    phi = [site.flat().clone() for site in sites]
    delta = [torch.zeros_like(values) for values in phi]
    for round_ in range(6):
        pairs = pair_members(0, round_, range(4))
        for number, site in enumerate(sites):
            site.move(gradients(number, round_))
        moved = [site.flat().clone() for site in sites]
        for i, j in pairs:
            pushed = (moved[i] - phi[i] + moved[j] - phi[j]) / 2
            middle = (phi[i] + phi[j]) / 2
            for number in (i, j):
                delta[number] = 0.5 * delta[number] + 0.7 * pushed - 0.7 * (phi[number] - middle)
            for number in (i, j):
                phi[number] = phi[number] + delta[number]
        exchange_in_pairs(sites, pairs, pull_sign)
    errors = [float((site.flat() - values).abs().max()) for site, values in zip(sites, phi, strict=True)]
    assert all(error < 1e-12 for error in errors) if pull_sign > 0 else min(errors) > 1e-3
    assert (sites[0].flat() - sites[1].flat()).abs().max() > 1e-3


def test_last_round_of_pairs_is_the_mean_of_all_sites():
    sites = [Site(NOLOCO) for _ in range(3)]
    for number, site in enumerate(sites):
        site.move(gradients(number, 0))
        site.buffers["bias"].fill_(number)
    exchange_in_pairs(sites, [(0, 2)])
    for number, site in enumerate(sites):
        site.move(gradients(number, 1))
        site.buffers["bias"].fill_(number)
    own = [site.outer.difference() for site in sites]
    local = [site.outer.local_vector((0,)) for site in sites]
    expected = sum(site.flat() for site in sites) / 3
    mean = local[0] / 3 + local[1] / 3 + local[2] / 3
    norms = [site.outer.merge(values, mean, (0,)) for site, values in zip(sites, own, strict=True)]
    for site, found, values in zip(sites, norms, own, strict=True):
        assert torch.equal(site.flat(), sites[0].flat())
        torch.testing.assert_close(site.flat(), expected, rtol=1e-14, atol=1e-14)
        assert torch.equal(torch.cat([w.flatten() for w in site.outer.weights.values()]), site.flat())
        torch.testing.assert_close(site.buffers["bias"], torch.ones(2))
        assert math.isclose(found.difference, float(values[:-2].square().sum()), rel_tol=1e-12)


def test_sparseloco_is_the_formula_of_its_paper():
    """e = beta e + D; s = topk(e); e = e - s; phi = phi - mean of s (arXiv:2508.15706, algorithm 1)."""
    settings = SitesConfig(count=2, residual=0.95, density=3 / 4096)
    sites = [Site(settings) for _ in range(2)]
    phi = [p.detach().clone() for p in sites[0].parameters.values()]
    e = [[torch.zeros_like(p) for p in phi] for _ in sites]
    for round_ in range(6):
        sent = []
        for number, site in enumerate(sites):
            site.move(gradients(number, round_))
            sparse = []
            for i, theta in enumerate(site.parameters.values()):
                e[number][i] = 0.95 * e[number][i] + (phi[i] - theta.detach())
                largest = e[number][i].flatten().abs().topk(min(3, theta.numel())).indices
                s = torch.zeros(theta.numel(), dtype=theta.dtype)
                s[largest] = e[number][i].flatten()[largest]
                sparse.append(s.view_as(theta))
                e[number][i] = e[number][i] - sparse[-1]
            sent.append(sparse)
        phi = [p - (a + b) / 2 for p, a, b in zip(phi, *sent, strict=True)]
        exchange_coded(sites)
        for site in sites:
            torch.testing.assert_close(site.flat(), torch.cat([p.flatten() for p in phi]), rtol=1e-12, atol=1e-12)


def exchange_coded(sites: list[Site]) -> None:
    own = [site.outer.difference() for site in sites]
    num_coded = sites[0].outer.num_coded((0,))
    code = sites[0].outer.code
    decoded = []
    for values in own:
        part = values[:num_coded]
        decoded.append(torch.cat([code.decode(code.encode(part), part), values[num_coded:]]))
    mean = sum(decoded) / len(sites) + torch.zeros_like(own[0])
    for site, values, read in zip(sites, own, decoded, strict=True):
        site.outer.keep_residual((0,), values, read)
        site.outer.step(values, mean)


CO2 = {"count": 2, "every": 3, "overlap": 3, "lr": 0.9, "momentum": 0.5, "penalty": True, "clip": 0.05}


class WholeRounds:
    """Sites that exchange a round during the next one; the exchange of the round under way is `means`."""

    def __init__(self, settings: SitesConfig) -> None:
        self.sites = [Site(settings) for _ in range(2)]
        self.own: list[Tensor] = []
        self.mean: Tensor | None = None
        self.last_update = 0.0

    def end_round(self, *, fails: bool = False, broken: str = "") -> None:
        """Take the outer step of the round before, unless its exchange has failed, and send this round."""
        update = 0.0
        for number, site in enumerate(self.sites):
            if self.mean is not None and fails:
                site.outer.put_back((0,), self.own[number])
            elif self.mean is not None:
                norm = math.sqrt(mean_square(site.outer, PendingRound(3, 6, (0,), self.own[number], self.mean))) or 1.0
                gap = {"no gap": 0.0, "gap of two rounds": 2 * self.last_update}.get(broken, self.last_update)
                mean = -self.mean if broken == "sign" else self.mean
                if broken == "momentum not saved":
                    for tensor in site.outer.entries(("momentum",)).values():
                        tensor.zero_()
                norms = site.outer.step(
                    self.own[number], mean, moves_both=broken != "difference lost", penalty=1 + gap / norm
                )
                update = math.sqrt(norms.update)
        self.last_update = update
        self.own = [site.outer.difference() for site in self.sites]
        self.mean = (self.own[0] + self.own[1]) / 2
        for site in self.sites:
            if broken != "sent twice":
                site.outer.take_weights(list(site.outer.weights))


@pytest.mark.parametrize("nesterov", [True, False])
def test_co2_is_the_formula_of_its_paper(nesterov):
    """m = mu m + mean / Lambda of the round before, clipped; phi = phi - lr m (arXiv:2401.16265, algorithm 1)."""
    run = WholeRounds(SitesConfig(**CO2, nesterov=nesterov))
    phi = run.sites[0].flat().clone()
    m = torch.zeros_like(phi)
    before = None
    step = torch.zeros_like(phi)
    was_clipped = False
    for round_ in range(5):
        moved = []
        for number, site in enumerate(run.sites):
            assert torch.equal(site.flat(), torch.cat([w.flatten() for w in site.outer.weights.values()]))
            site.move(gradients(number, round_))
            moved.append(0.1 * torch.cat([g.flatten() for g in gradients(number, round_).values()]))
        run.end_round()
        if before is not None:
            g = before / (1 + step.norm() / before.norm())
            was_clipped |= bool(((0.5 * m + g).abs() > 0.05).any())
            m = (0.5 * m + g).clamp(-0.05, 0.05)
            step = 0.9 * (g + 0.5 * m) if nesterov else 0.9 * m
            phi = phi - step
        before = (moved[0] + moved[1]) / 2
        for site in run.sites:
            torch.testing.assert_close(site.flat(), phi, rtol=1e-12, atol=1e-12)
    assert was_clipped


@pytest.mark.parametrize(
    "broken", ["sign", "no gap", "gap of two rounds", "momentum not saved", "difference lost", "sent twice"]
)
def test_a_wrong_step_of_co2_is_noticed(broken):
    right, wrong = (WholeRounds(SitesConfig(**CO2 | {"clip": 0.0})) for _ in range(2))
    for round_ in range(4):
        for run, how in ((right, ""), (wrong, broken)):
            for number, site in enumerate(run.sites):
                site.move(gradients(number, round_))
            run.end_round(broken=how)
    assert (right.sites[0].flat() - wrong.sites[0].flat()).abs().max() > 1e-3


@pytest.mark.parametrize("residual", [0.0, 0.9])
def test_a_round_of_co2_that_is_not_applied_goes_into_the_next(residual):
    """The differences of the failed exchange return to the weights, and the residual keeps its bits."""
    settings = SitesConfig(**CO2 | {"penalty": False, "clip": 0.0}, precision="int8", residual=residual)
    run = WholeRounds(settings)
    whole = WholeRounds(settings)
    for site in (*run.sites, *whole.sites):
        for name, e in site.outer.residual.items():
            e.copy_(gradients(7, 7)[name])
    residuals = [e.clone() for e in run.sites[0].outer.residual.values()]
    for step in range(3):
        for group in (run, whole):
            for number, site in enumerate(group.sites):
                site.move(gradients(number, step))
        run.end_round(fails=step == 1)
        if step != 0:
            whole.end_round()
        assert all(torch.equal(e, old) for e, old in zip(run.sites[0].outer.residual.values(), residuals, strict=True))
    torch.testing.assert_close(run.sites[0].flat(), whole.sites[0].flat(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(run.own[1], whole.own[1], rtol=1e-12, atol=1e-12)


def test_buffers_of_co2_go_on_from_their_own():
    """The mean of what was sent arrives a round later: each site moves by what it was off."""
    sites = [Site(SitesConfig(**CO2)) for _ in range(2)]
    sites[1].buffers["bias"].copy_(torch.tensor([1.5, 3.0]))
    own = [site.outer.difference() for site in sites]
    mean = (own[0] + own[1]) / 2
    for site, values in zip(sites, own, strict=True):
        pending = PendingRound(3, 6, (0,), values, mean).with_corrections(site.outer.num_coded((0,)))
        site.buffers["bias"].add_(0.25)
        site.outer.step(values, pending.mean, moves_both=True)
    assert sites[0].buffers["bias"].tolist() == sites[1].buffers["bias"].tolist() == [1.25, 1.25]


def test_the_norm_of_the_last_step_is_saved_to_the_bit():
    for number in (0.0, 1e-30, 0.1, 3.5e20):
        assert bits_to_float(float_to_bits(number)) == number
