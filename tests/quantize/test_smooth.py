"""SmoothQuant: scales by the formula, unchanged float output, smaller int8 error, and norms that are not smoothed."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from scalepoint.errors import ConfigError, ScalepointError
from scalepoint.quantize import (
    QuantConfig,
    SmoothQuantConfig,
    SmoothQuantObserver,
    TensorQuantConfig,
    calibrate,
    disable_fake_quant,
    enable_fake_quant,
    insert_qdq,
    quantize,
)
from scalepoint.quantize.record import record_of
from scalepoint.transformation import transform
from tests.models import Decoder, VisionTransformer
from tests.pace import fast

HIDDEN = 16
OUTLIERS = {1: 30.0, 6: 60.0, 11: 100.0}
FLOOR = 1e-5
pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")  # emitted by torch when it copies a graph


class WrittenRMSNorm(nn.Module):
    """As in language models: computed in float32, cast back, multiplied by a weight."""

    def __init__(self, hidden):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))

    def forward(self, x):
        y = x.to(torch.float32)
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * y.to(x.dtype)


class ScaledRMSNorm(nn.Module):
    """A norm whose only factor is a number."""

    def __init__(self, hidden):
        super().__init__()

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * 2.0


class OffsetRMSNorm(nn.Module):
    """As in Gemma: the parameter is the weight minus one."""

    def __init__(self, hidden):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(hidden))

    def forward(self, x):
        y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return y * (1.0 + self.weight)


class FunctionalNorm(nn.Module):
    """F.layer_norm with its own parameters."""

    def __init__(self, hidden):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(hidden))
        self.shift = nn.Parameter(torch.zeros(hidden))

    def forward(self, x):
        return F.layer_norm(x, (x.shape[-1],), self.gain, self.shift, 1e-5)


class BareFunctionalNorm(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.hidden = hidden

    def forward(self, x):
        return F.layer_norm(x, (self.hidden,))


class Layer(nn.Module):
    """A pre-norm transformer layer: q/k/v read one norm, gate/up the other."""

    def __init__(self, norm, hidden=HIDDEN):
        super().__init__()
        self.attention_norm, self.mlp_norm = norm(hidden), norm(hidden)
        self.q, self.k, self.v, self.o = (nn.Linear(hidden, hidden) for _ in range(4))
        self.gate, self.up = nn.Linear(hidden, 2 * hidden), nn.Linear(hidden, 2 * hidden)
        self.down = nn.Linear(2 * hidden, hidden)

    def forward(self, x):
        h = self.attention_norm(x)
        q, k, v = (part(h).unflatten(-1, (2, -1)).transpose(1, 2) for part in (self.q, self.k, self.v))
        h = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2)
        x = x + self.o(h)
        h = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Transformer(nn.Module):
    def __init__(self, norm, layers):
        super().__init__()
        self.layers = nn.Sequential(*(Layer(norm) for _ in range(layers)))

    def forward(self, x):
        return self.layers(x)


NORMS = {
    "LayerNorm": nn.LayerNorm,
    "LayerNorm without bias": lambda hidden: nn.LayerNorm(hidden, bias=False),
    "LayerNorm without affine": lambda hidden: nn.LayerNorm(hidden, elementwise_affine=False),
    "F.layer_norm": FunctionalNorm,
    "F.layer_norm without affine": BareFunctionalNorm,
    "RMSNorm": nn.RMSNorm,
    "RMSNorm without affine": lambda hidden: nn.RMSNorm(hidden, elementwise_affine=False),
    "RMSNorm written out": WrittenRMSNorm,
}
WITH_WEIGHT = {"LayerNorm": "weight", "F.layer_norm": "gain", "RMSNorm": "weight", "RMSNorm written out": "weight"}


def transformer(norm=nn.LayerNorm, seed=0, outliers=None, layers=1):
    """Biases are random too. Columns that read an outlier channel are smaller by its square root."""
    torch.manual_seed(seed)
    model = Transformer(norm, layers).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("bias", "shift")):
                parameter.normal_(0, 0.3)
        for layer in model.layers:
            readers = {layer.attention_norm: (layer.q, layer.k, layer.v), layer.mlp_norm: (layer.gate, layer.up)}
            for layer_norm in (layer.attention_norm, layer.mlp_norm):
                for channel, times in (outliers or {}).items():
                    for parameter in layer_norm.parameters():
                        parameter[channel] *= times
                    for reader in readers[layer_norm]:
                        reader.weight[:, channel] /= times**0.5
    return model


def data(batches=3, seed=7):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(2, 5, HIDDEN, generator=generator) for _ in range(batches)]


def config(**smooth):
    return QuantConfig(
        activation=TensorQuantConfig(),
        weight=TensorQuantConfig(per_channel=True),
        smooth_quant=SmoothQuantConfig(enabled=True, **smooth) if smooth.pop("on", True) else SmoothQuantConfig(),
    )


def smoothed(model, batches=None, **smooth):
    batches = data() if batches is None else batches
    return quantize(model, batches[0], config(**smooth), forward_loop=batches).eval()


def unsmoothed(model, batches):
    return quantize(model, batches[0], config(on=False), forward_loop=batches).eval()


def observers(model):
    return {module.name: module for module in model.modules() if isinstance(module, SmoothQuantObserver)}


def refusals(model):
    return record_of(model).unsmoothed


def relative(expected, actual):
    return float((expected - actual).detach().abs().max() / expected.detach().abs().max())


@torch.no_grad()
def float_difference(model, quantized, inputs):
    disable_fake_quant(quantized)
    output = quantized(inputs)
    enable_fake_quant(quantized)
    return relative(model(inputs), output)


@torch.no_grad()
def quantization_error(model, quantized, inputs):
    expected = model(inputs)
    return float((quantized(inputs) - expected).norm() / expected.norm())


def expected_scales(activation_max, weights, alpha):
    """The formula, implemented independently in float64, channel by channel."""
    weight_max = torch.cat([weight.double() for weight in weights]).abs().max(dim=0).values.tolist()
    largest = activation_max.double().tolist()
    pairs = zip(largest, weight_max, strict=True)
    return torch.tensor([max(a, FLOOR) ** alpha / max(w, FLOOR) ** (1 - alpha) for a, w in pairs])


def alone(norm, linears, alpha=0.5, **more):
    return SmoothQuantObserver(["reader"], norm, True, SmoothQuantConfig(enabled=True, alpha=alpha), linears, **more)


class TestTheObserverAlone:
    @pytest.mark.parametrize("alpha", [0.0, 0.3, 0.5, 1.0])
    @pytest.mark.parametrize("count", [1, 3])
    def test_the_scales_follow_the_formula(self, alpha, count):
        torch.manual_seed(1)
        norm = nn.LayerNorm(6)
        nn.init.normal_(norm.weight)
        nn.init.normal_(norm.bias)
        linears = [nn.Linear(6, 3 + index) for index in range(count)]
        before = copy.deepcopy([norm, *linears])
        observer = alone(norm, linears, alpha)
        observer.register_forward_hook()
        batches = [torch.randn(2, 4, 6), torch.randn(5, 6) * 3, torch.randn(1, 2, 3, 6)]
        outputs = [norm(batch).detach() for batch in batches]
        largest = torch.cat([output.reshape(-1, 6) for output in outputs]).abs().amax(0)
        torch.testing.assert_close(observer.activation_max, largest, rtol=0, atol=0)
        s = expected_scales(largest, [linear.weight for linear in before[1:]], alpha)
        observer.compute_smooth_scales()
        torch.testing.assert_close(norm.weight.detach(), before[0].weight.detach() / s, rtol=1e-5, atol=0)
        torch.testing.assert_close(norm.bias.detach(), before[0].bias.detach() / s, rtol=1e-5, atol=0)
        for linear, old in zip(linears, before[1:], strict=True):
            torch.testing.assert_close(linear.weight.detach(), old.weight.detach() * s, rtol=1e-5, atol=0)
            assert torch.equal(linear.bias, old.bias)
            for batch, output in zip(batches, outputs, strict=True):
                assert relative(old(output), linear(norm(batch))) < 1e-5

    def test_both_maxima_are_floored(self):
        norm = nn.LayerNorm(4)
        linear = nn.Linear(4, 2, bias=False)
        with torch.no_grad():
            linear.weight.copy_(torch.tensor([[0.0, 0.5, 1e-7, 0.25], [0.0, -2.0, -1e-6, 0.25]]))
        observer = alone(norm, [linear], 0.5, activation_max=torch.tensor([4.0, 0.0, 1e-9, 1.0]))
        observer.compute_smooth_scales()
        s = torch.tensor([(4 / 1e-5) ** 0.5, (1e-5 / 2) ** 0.5, 1.0, 2.0])
        torch.testing.assert_close(norm.weight.detach(), 1 / s)
        torch.testing.assert_close(linear.weight[:, 1].detach(), torch.tensor([0.5, -2.0]) * s[1])
        assert torch.isfinite(linear.weight).all()

    def test_a_layer_of_zeros_stays_finite(self):
        norm, linear = nn.LayerNorm(4), nn.Linear(4, 2)
        nn.init.zeros_(linear.weight)
        observer = alone(norm, [linear], activation_max=torch.zeros(4))
        observer.compute_smooth_scales()
        assert torch.isfinite(norm.weight).all()
        assert torch.equal(linear.weight, torch.zeros(2, 4))

    def test_without_linear_readers_nothing_happens(self):
        norm = nn.LayerNorm(4)
        observer = alone(norm, [], activation_max=torch.ones(4) * 9)
        observer.compute_smooth_scales()
        assert torch.equal(norm.weight, torch.ones(4))
        alone(norm, []).compute_smooth_scales()  # no error either if nothing was observed

    def test_nothing_observed_is_an_error_that_names_the_norm(self):
        norm, linear = nn.LayerNorm(4), nn.Linear(4, 2)
        before = linear.weight.clone()
        observer = alone(norm, [linear])
        observer.name = "block.ln_1"
        with pytest.raises(RuntimeError, match=r"block\.ln_1"):
            observer.compute_smooth_scales()
        assert torch.equal(linear.weight, before)

    def test_a_second_call_without_new_data_is_an_error_and_changes_nothing(self):
        norm, linear = nn.LayerNorm(4), nn.Linear(4, 2)
        observer = alone(norm, [linear])
        observer.register_forward_hook()
        norm(torch.randn(8, 4) * 9)
        observer.compute_smooth_scales()
        assert observer.activation_max is None
        before = linear.weight.clone()
        with pytest.raises(RuntimeError, match="observed nothing"):
            observer.compute_smooth_scales()
        assert torch.equal(linear.weight, before)

    def test_consumers_may_be_modules(self):
        linear = nn.Linear(4, 2)
        observer = SmoothQuantObserver({linear}, nn.LayerNorm(4), True, downstream_linears=[linear])
        assert linear in observer.consumers
        with pytest.raises(RuntimeError, match="Linear"):
            observer.compute_smooth_scales()

    def test_the_error_of_an_unnamed_observer_names_its_reader(self):
        with pytest.raises(RuntimeError, match="reader"):
            alone(nn.LayerNorm(4), [nn.Linear(4, 2)]).compute_smooth_scales()

    def test_empty_tensors_do_not_count_as_observed(self):
        observer = alone(norm := nn.LayerNorm(4), [nn.Linear(4, 2)])
        observer.register_forward_hook()
        norm(torch.empty(0, 4))
        with pytest.raises(RuntimeError):
            observer.compute_smooth_scales()

    def test_an_initial_maximum_is_kept_and_can_grow(self):
        observer = alone(norm := nn.LayerNorm(2), [nn.Linear(2, 2)], activation_max=torch.tensor([100.0, 0.0]))
        observer.register_forward_hook()
        norm(torch.tensor([[1.0, -1.0]]))
        assert observer.activation_max[0] == 100
        assert observer.activation_max[1] > 0.9

    def test_nothing_is_observed_after_the_hook_is_removed(self):
        observer = alone(norm := nn.LayerNorm(4), [nn.Linear(4, 2)])
        handle = observer.register_forward_hook()
        handle.remove()
        norm(torch.randn(3, 4))
        assert observer.activation_max is None

    @pytest.mark.parametrize("norm", [nn.RMSNorm(6), nn.LayerNorm(6, elementwise_affine=False)], ids=["rms", "bare"])
    def test_rms_norms_and_norms_without_weight_are_supported(self, norm):
        linear, x = nn.Linear(6, 3), torch.randn(4, 6) * torch.tensor([1, 50, 1, 1, 9, 1.0])
        expected = linear(norm(x)).detach()
        observer = alone(norm, [linear])
        observer.register_forward_hook()
        largest, weight = norm(x).detach().abs().amax(0), linear.weight.detach().clone()
        s = expected_scales(largest, [weight], 0.5)
        observer.compute_smooth_scales()
        torch.testing.assert_close(norm.weight.detach(), 1 / s, rtol=1e-5, atol=0)
        assert relative(expected, linear(norm(x)).detach()) < 1e-5

    def test_half_precision_statistics_are_float32(self):
        norm, linear = nn.LayerNorm(4).half(), nn.Linear(4, 2).half()
        observer = alone(norm, [linear])
        observer.register_forward_hook()
        x = torch.randn(8, 4).half()
        expected = linear(norm(x)).detach()
        assert observer.activation_max.dtype == torch.float32
        observer.compute_smooth_scales()
        assert relative(expected.float(), linear(norm(x)).detach().float()) < 5e-3


class TestEveryNorm:
    @pytest.mark.parametrize(
        "name", fast(NORMS, "LayerNorm", "F.layer_norm without affine", "RMSNorm", "RMSNorm written out")
    )
    def test_the_float_output_does_not_change(self, name):
        model, batches = transformer(NORMS[name], outliers=OUTLIERS), data()
        quantized = smoothed(model, batches)
        assert len(observers(quantized)) == 2, refusals(quantized)
        for batch in (*batches, *data(2, seed=99)):
            assert float_difference(model, quantized, batch) < 1e-5

    @pytest.mark.parametrize("name", fast(WITH_WEIGHT, "LayerNorm", "RMSNorm written out"))
    def test_the_scales_follow_the_formula(self, name):
        model, batches = transformer(NORMS[name], outliers=OUTLIERS), data()
        layer = model.layers[0]
        outputs = []
        handle = layer.attention_norm.register_forward_hook(lambda *args: outputs.append(args[2].detach()))
        for batch in batches:
            model(batch)
        handle.remove()
        largest = torch.cat(outputs).flatten(0, 1).abs().amax(0)
        s = expected_scales(largest, [layer.q.weight, layer.k.weight, layer.v.weight], 0.5)
        state = smoothed(model, batches).state_dict()
        for linear in ("q", "k", "v"):
            smoothed_weight, old = state[f"layers.0.{linear}.weight"], getattr(layer, linear).weight.detach()
            torch.testing.assert_close(smoothed_weight, old * s, rtol=1e-4, atol=1e-7)
        attribute = WITH_WEIGHT[name]
        smoothed_weight = state[f"layers.0.attention_norm.{attribute}"]
        torch.testing.assert_close(
            smoothed_weight, getattr(layer.attention_norm, attribute).detach() / s, rtol=1e-4, atol=1e-7
        )

    def test_q_k_v_and_gate_up_share_their_norms_scales(self):
        by_name = observers(smoothed(transformer(layers=2)))
        assert {name: sorted(observer.consumers) for name, observer in by_name.items()} == {
            f"layers.{index}.{norm}": [f"layers.{index}.{linear}" for linear in linears]
            for index in (0, 1)
            for norm, linears in (("attention_norm", "kqv"), ("mlp_norm", ("gate", "up")))
        }

    def test_packed_attention_of_torch_is_smoothed(self):
        torch.manual_seed(0)
        model, images = VisionTransformer(24, 2, 1, 32, 16, 5).eval(), torch.randn(2, 3, 32, 32)
        quantized = smoothed(model, [images])
        assert float_difference(model, quantized, images) < 1e-5
        assert "encoder.layers.encoder_layer_0.ln_1" in observers(quantized), refusals(quantized)

    def test_a_norm_weight_stored_as_an_offset_is_not_smoothed_wrongly(self):
        model, batches = transformer(OffsetRMSNorm), data()
        assert float_difference(model, smoothed(model, batches), batches[0]) < 1e-5

    def test_a_norm_over_two_axes_keeps_the_float_output(self):
        torch.manual_seed(0)
        model = nn.Sequential(nn.LayerNorm((3, HIDDEN)), nn.Linear(HIDDEN, 8)).eval()
        nn.init.normal_(model[0].weight)
        nn.init.normal_(model[0].bias)
        inputs = torch.randn(4, 3, HIDDEN) * 5
        assert float_difference(model, smoothed(model, [inputs]), inputs) < 1e-5

    def test_a_decoder_keeps_the_float_output(self):
        torch.manual_seed(0)
        model = Decoder().eval()
        for layer in model.layers:
            for norm in (layer.input_layernorm, layer.post_attention_layernorm):
                norm.weight.data[[3, 17]] *= 40
        tokens = [torch.randint(0, 50, (2, 7)) for _ in range(3)]
        quantized = smoothed(model, tokens)
        assert len(observers(quantized)) == 4
        assert float_difference(model, quantized, tokens[0]) < 1e-5


class TestTheErrorShrinks:
    @pytest.mark.parametrize(
        "norm", ["LayerNorm", "RMSNorm", pytest.param("RMSNorm written out", marks=pytest.mark.slow)]
    )
    @pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
    def test_the_error_is_at_least_halved(self, norm, seed):
        model, batches = transformer(NORMS[norm], seed, OUTLIERS, layers=2), data(4, seed)
        plain = quantization_error(model, unsmoothed(model, batches), batches[0])
        smooth = quantization_error(model, smoothed(model, batches), batches[0])
        searched = quantization_error(model, smoothed(model, batches, alpha="search"), batches[0])
        assert plain > 5e-3  # without smoothing the outliers must cause a clear error
        assert smooth < plain / 2
        assert searched < plain / 2

    @pytest.mark.slow
    def test_the_error_of_a_decoder_shrinks(self):
        torch.manual_seed(0)
        model = Decoder(hidden=64).eval()
        for layer in model.layers:
            readers = {
                layer.input_layernorm: (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj),
                layer.post_attention_layernorm: (layer.mlp.gate_proj, layer.mlp.up_proj),
            }
            for norm, linears in readers.items():
                norm.weight.data[[3, 17]] *= 80
                for linear in linears:
                    linear.weight.data[:, [3, 17]] /= 10
        tokens = [torch.randint(0, 50, (2, 9)) for _ in range(3)]
        plain = quantization_error(model, unsmoothed(model, tokens), tokens[0])
        assert quantization_error(model, smoothed(model, tokens), tokens[0]) < plain / 2


class TestAlpha:
    @pytest.mark.slow
    @pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
    def test_a_search_is_close_to_the_best_alpha(self, seed):
        model, batches = transformer(seed=seed, outliers=OUTLIERS), data(4, seed)
        alphas = (0.0, 0.4, 0.8)
        fixed = [quantization_error(model, smoothed(model, batches, alpha=alpha), batches[0]) for alpha in alphas]
        searched_error = quantization_error(model, smoothed(model, batches, alpha="search", alphas=alphas), batches[0])
        assert searched_error <= max(fixed)
        assert searched_error <= 1.5 * min(fixed)

    def test_a_search_chooses_one_of_the_candidates(self):
        quantized = smoothed(transformer(outliers=OUTLIERS), alpha="search", alphas=(0.3, 0.55))
        assert {observer.alpha for observer in observers(quantized).values()} <= {0.3, 0.55}

    def test_a_layer_can_have_its_own_alpha(self):
        model, batches = transformer(outliers=OUTLIERS, layers=2), data()
        mixed = smoothed(model, batches, alpha=0.5, layers={"layers.1.*": 0.8, "layers.0.mlp_norm": 0.2})
        assert {name: observer.alpha for name, observer in observers(mixed).items()} == {
            "layers.0.attention_norm": 0.5,
            "layers.0.mlp_norm": 0.2,
            "layers.1.attention_norm": 0.8,
            "layers.1.mlp_norm": 0.8,
        }
        all_high = smoothed(model, batches, alpha=0.8).state_dict()
        assert torch.equal(mixed.state_dict()["layers.1.q.weight"], all_high["layers.1.q.weight"])
        assert not torch.equal(mixed.state_dict()["layers.0.up.weight"], all_high["layers.0.up.weight"])
        assert float_difference(model, mixed, batches[0]) < 1e-5

    @pytest.mark.parametrize("name", ["layers.9.*", "layers.0.atention_norm", "layers.0.q"])
    def test_a_glob_that_matches_no_norm_is_an_error(self, name):
        with pytest.raises(ConfigError) as error:
            smoothed(transformer(), layers={name: 0.7})
        assert name in str(error.value)

    def test_the_error_suggests_the_nearest_name(self):
        with pytest.raises(ConfigError, match=r"layers\.0\.attention_norm"):
            smoothed(transformer(), layers={"layers.0.atention_norm": 0.7})

    @pytest.mark.parametrize("fields", [{"alpha": 1.5}, {"alpha": -0.1}, {"layers": {"a": 2.0}}, {"alphas": ()}])
    def test_an_invalid_alpha_is_refused(self, fields):
        with pytest.raises(ValueError, match="alpha"):
            SmoothQuantConfig(enabled=True, **fields)


class PostNorm(nn.Module):
    """The norm's output is read by a linear and by the residual."""

    def __init__(self):
        super().__init__()
        self.norm, self.fc, self.out = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.last = nn.LayerNorm(HIDDEN)

    def forward(self, x):
        h = self.norm(x)
        return self.out(self.last(h + F.relu(self.fc(h))))


class TiedReaders(nn.Module):
    """One linear reads two norms; another norm has its own readers."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.free = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.one, self.two = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.two.weight = self.one.weight
        self.out = nn.Linear(HIDDEN, 4)

    def forward(self, x):
        return self.out(self.free(self.one(self.first(x)) + self.two(self.second(x * 2 + 1))))


class Hidden(nn.Module):
    """The weight of the reader is also an operand of another operation."""

    def __init__(self):
        super().__init__()
        self.norm, self.fc = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x):
        return self.fc(self.norm(x)) + (x @ self.fc.weight) + self.fc.weight.sum()


class SharedNorm(nn.Module):
    """One norm, called twice with different readers."""

    def __init__(self):
        super().__init__()
        self.norm, self.a, self.b = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x):
        return self.b(self.norm(x + self.a(self.norm(x))))


class SharedNormParameters(nn.Module):
    """Two norms that share a weight."""

    def __init__(self):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.n2.weight = self.n1.weight
        self.a, self.b = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x):
        return self.b(self.n2(x + self.a(self.n1(x))))


class SharedLinear(nn.Module):
    """One linear that reads a norm and something else."""

    def __init__(self):
        super().__init__()
        self.norm, self.fc = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x):
        return self.fc(self.norm(x)) + self.fc(x)


class ReturnsNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.fc = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x):
        h = self.norm(x)
        return torch.cat([self.fc(h), h], dim=-1)


class TwiceTheSame(nn.Module):
    """A product of the norm's output with itself behind a linear, and an activation between norm and linear."""

    def __init__(self):
        super().__init__()
        self.norm, self.fc = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x):
        return self.fc(F.gelu(self.norm(x)))


class ComputedWeight(nn.Module):
    """The readers' weights are rows of one packed parameter."""

    def __init__(self):
        super().__init__()
        self.norm, self.packed = nn.LayerNorm(HIDDEN), nn.Parameter(torch.randn(24, HIDDEN) * 0.2)
        self.last = nn.Linear(12, 4)

    def forward(self, x):
        h = self.norm(x)
        return self.last(F.linear(h, self.packed[:12]) * F.linear(h, self.packed[12:]))


def noisy(model, seed=0):
    torch.manual_seed(seed)
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            nn.init.normal_(module.weight, 1.0, 0.5)
            nn.init.normal_(module.bias)
            module.weight.data[3] *= 50
    return model.eval()


NOT_SMOOTHED = {
    "post-norm": (PostNorm, ["norm"], ["last"]),
    "tied linears": (TiedReaders, ["first", "second"], ["free"]),
    "a weight with another reader": (Hidden, ["norm"], []),
    "a norm called twice": (SharedNorm, ["norm"], []),
    "norms that share a weight": (SharedNormParameters, ["n2"], []),
    "a linear called twice": (SharedLinear, ["norm"], []),
    "a norm that is returned": (ReturnsNorm, ["norm"], []),
    "a weight that is computed": (ComputedWeight, ["norm"], []),
    "an activation in between": (TwiceTheSame, ["norm"], []),
}


class TestLeftAlone:
    @pytest.mark.parametrize("case", NOT_SMOOTHED)
    def test_the_float_output_does_not_change(self, case):
        torch.manual_seed(0)
        model, batches = noisy(NOT_SMOOTHED[case][0]()), data()
        assert float_difference(model, smoothed(model, batches), batches[0]) < 1e-5

    @pytest.mark.parametrize("case", NOT_SMOOTHED)
    def test_norms_that_are_not_smoothed_are_listed_with_a_reason(self, case):
        torch.manual_seed(0)
        kind, refused, smoothed_names = NOT_SMOOTHED[case]
        model = noisy(kind())
        before = {name: value.clone() for name, value in model.state_dict().items()}
        quantized = smoothed(model, data())
        assert sorted(observers(quantized)) == smoothed_names
        listed = refusals(quantized)
        assert set(refused) <= {name.partition("@")[0].rstrip("_0123456789") for name in listed} | set(listed)
        assert all(isinstance(reason, str) and reason for reason in listed.values())
        for name in refused:
            assert torch.equal(quantized.state_dict()[f"{name}.weight"], before[f"{name}.weight"])

    def test_a_norm_before_a_tied_head_is_not_smoothed(self):
        torch.manual_seed(0)
        model, tokens = Decoder().eval(), torch.randint(0, 50, (2, 7))
        quantized = smoothed(model, [tokens])
        assert "norm" in refusals(quantized)
        assert torch.equal(quantized.state_dict()["embed_tokens.weight"], model.embed_tokens.weight)


class TestTheRoad:
    def test_the_callers_model_does_not_change(self):
        model = transformer(outliers=OUTLIERS).train()
        before = copy.deepcopy(model.state_dict())
        smoothed(model)
        assert list(model.state_dict()) == list(before)
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        assert model.training
        assert not any(module._forward_hooks for module in model.modules())

    def test_hooks_are_removed_after_smoothing(self):
        assert not any(module._forward_hooks for module in smoothed(transformer()).modules())

    def test_disabled_smoothing_changes_nothing(self):
        model = transformer(outliers=OUTLIERS)
        quantized = unsmoothed(model, data())
        assert not observers(quantized)
        assert torch.equal(quantized.state_dict()["layers.0.q.weight"], model.layers[0].q.weight)

    def test_calibrating_again_does_not_smooth_again(self):
        model, batches = transformer(outliers=OUTLIERS), data()
        quantized = smoothed(model, batches)
        before = quantized.state_dict()["layers.0.q.weight"].clone()
        calibrate(quantized, batches)
        assert torch.equal(quantized.state_dict()["layers.0.q.weight"], before)
        assert float_difference(model, quantized, batches[0]) < 1e-5

    def test_smoothing_a_copy_does_not_change_the_original(self):
        model, batches = transformer(outliers=OUTLIERS), data()
        result = transform(model, batches[0])
        original = insert_qdq(result.model, result.matches, config())
        before = original.state_dict()["layers.0.q.weight"].clone()
        duplicate = calibrate(copy.deepcopy(original), batches)
        assert torch.equal(original.state_dict()["layers.0.q.weight"], before)
        assert not torch.equal(duplicate.state_dict()["layers.0.q.weight"], before)
        assert float_difference(model, duplicate, batches[0]) < 1e-5

    def test_a_failing_loop_leaves_the_weights_unchanged(self):
        model, batches = transformer(outliers=OUTLIERS), data()
        result = transform(model, batches[0])
        quantized = insert_qdq(result.model, result.matches, config())

        def loop(model):
            model(batches[0])
            raise KeyError("the disk is gone")

        with pytest.raises(KeyError):
            calibrate(quantized, loop)
        assert torch.equal(quantized.state_dict()["layers.0.q.weight"], model.layers[0].q.weight)
        assert not any(module._forward_hooks for module in quantized.modules())
        calibrate(quantized, batches)
        assert float_difference(model, quantized, batches[0]) < 1e-5

    def test_a_loop_that_feeds_nothing_is_an_error(self):
        with pytest.raises(ScalepointError):
            quantize(transformer(), data()[0], config(), forward_loop=lambda model: None)

    def test_a_nan_in_the_data_never_reaches_the_weights(self):
        model, batches = transformer(outliers=OUTLIERS), data()
        result = transform(model, batches[0])
        quantized = insert_qdq(result.model, result.matches, config())
        bad = batches[1].clone()
        bad[0, 0, 0] = float("nan")
        with pytest.raises(ScalepointError):
            calibrate(quantized, [batches[0], bad])
        state = quantized.state_dict()
        assert all(torch.isfinite(state[name]).all() for name in model.state_dict())

    @pytest.mark.filterwarnings("ignore:.*were skipped")
    def test_a_skipped_nan_batch_does_not_count(self):
        model, batches = transformer(outliers=OUTLIERS), data()
        result = transform(model, batches[0])
        quantized = insert_qdq(result.model, result.matches, config())
        calibrate(quantized, [batches[0], torch.full_like(batches[1], float("nan"))], on_nan="skip")
        assert float_difference(model, quantized, batches[0]) < 1e-5
