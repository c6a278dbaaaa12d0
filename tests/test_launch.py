"""The road from a call to the compiled host function, with a recorder in the function's place.

Memory of the CPU stands in for a GPU's; what the function would do with its arguments is for the
tests on a GPU.
"""

from __future__ import annotations

import pytest
import torch

import moe_ep_jit as moe
from moe_ep_jit import formats, jit, launch, layout, tuned, variants, workspace
from moe_ep_jit.tools import precompile

HIDDEN, TOP_K, MAX_TOKENS, STREAM = 128, 2, 256, 77
PROBLEM = moe.Problem(
    hidden=HIDDEN,
    intermediate=64,
    num_experts=4,
    top_k=TOP_K,
    max_tokens=MAX_TOKENS,
    format="mxfp8",
    activation=moe.SwiGLU(limit=7.0, alpha=1.702, beta=1.0),
)


class Gpu:
    """What the patched calls have seen and what they answer."""

    def __init__(self):
        self.calls = []  # (facts, arguments by name) of each launch
        self.loads = []  # facts of each load
        self.cached = False  # what jit finds on disk
        self.jobs = []  # facts that precompile was asked for
        self.capturing = False
        self.device = None  # what a guard has set
        self.synchronized = 0

    def load(self, op, facts, *, arch, build, name, compile=True):
        assert (op, arch) == ("moe", "sm_90a")
        assert build == "moe_ep_jit.kernels.sm90.forward:compile_op"
        if not (compile or self.cached):
            raise RuntimeError("not in the cache")
        self.loads.append(facts)
        names = list(layout.LAUNCH_ARGS)

        def function(*args):
            self.calls.append((facts, dict(zip(names, args, strict=True))))

        return function

    def run(self, jobs):
        self.jobs += [job.facts for job in jobs]
        return {"compiled": len(self.jobs), "workers": 2, "seconds": 0.1}


@pytest.fixture
def gpu(monkeypatch):
    gpu = Gpu()

    class Stream:
        cuda_stream = STREAM

        def synchronize(self):
            gpu.synchronized += 1

    class Properties:
        multi_processor_count = 132
        name = "Some GPU"

    def synchronize(device):
        gpu.synchronized += 1

    patches = {
        "current_stream": lambda device=None: Stream(),
        "current_device": lambda: None,  # the index of torch.device("cpu")
        "is_current_stream_capturing": lambda: gpu.capturing,
        "get_device_properties": lambda device: Properties,
        "synchronize": synchronize,
    }
    for name, function in patches.items():
        monkeypatch.setattr(torch.cuda, name, function)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: STREAM, raising=False)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
    monkeypatch.setattr(variants, "resolve_backend", lambda device, backend="auto": "sm_90a")
    monkeypatch.setattr(
        workspace,
        "_error_record",
        lambda pinned: torch.zeros(layout.ERROR_WORDS, dtype=torch.int32),
    )
    monkeypatch.setattr(jit, "load", gpu.load)
    monkeypatch.setattr(precompile, "run", gpu.run)
    return gpu


def make_weights(problem=PROBLEM):
    w13 = torch.randn(problem.num_experts, 2 * problem.intermediate, problem.hidden).bfloat16()
    w2 = torch.randn(problem.num_experts, problem.hidden, problem.intermediate).bfloat16()
    return moe.prepare_weights(w13, w2, problem, arch="sm_90a")


def make_inputs(tokens):
    x = torch.randn(tokens, HIDDEN).bfloat16()
    ids = torch.randint(0, 4, (tokens, TOP_K), dtype=torch.int32)
    return x, ids, torch.rand(tokens, TOP_K)


@pytest.mark.parametrize("fmt", ["mxfp8", "nvfp4"])
def test_one_call_with_every_argument_in_its_place(gpu, fmt):
    problem = PROBLEM.with_(format=fmt)
    weights = make_weights(problem)
    ws = moe.Workspace(problem, device="cpu", debug=False)
    x, ids, topk_weights = make_inputs(5)
    y = moe.moe_forward(x, ids, topk_weights, weights, ws)
    (facts, args), *others = gpu.calls
    assert not others
    assert facts["kind"] == weights.kind
    assert facts["x_kind"] == "bf16"
    assert (y.data_ptr(), y.shape) == (ws.output.data_ptr(), (5, HIDDEN))
    regions = layout.regions(weights.problem, weights.operand)
    want = {
        "stages": layout.STAGE_ALL,
        "num_sms": 132,
        "tokens": 5,
        "num_tokens": 0,
        "x": x.data_ptr(),
        "x_stride": HIDDEN,
        "x_sf": 0,
        "x_global_scale": 0,
        "x_global_stride": 0,
        "ids": ids.data_ptr(),
        "ids_stride": TOP_K,
        "ids_words": 1,
        "topk_weights": topk_weights.data_ptr(),
        "topk_weights_stride": TOP_K,
        "topk_weights_type": 0,
        "out": y.data_ptr(),
        "out_stride": HIDDEN,
        "limit": 7.0,
        "alpha": 1.702,
        "beta": 1.0,
        "w13": weights.tensors["w13"].data_ptr(),
        "w13_sf": weights.tensors["w13_sf"].data_ptr(),
        "w13_bias": 0,
        "w2": weights.tensors["w2"].data_ptr(),
        "w2_sf": weights.tensors["w2_sf"].data_ptr(),
        "w2_bias": 0,
        "h_global_scale": 0,
        **{name: ws.views(problem)[name].data_ptr() for name in regions},
        "recv_rows": MAX_TOKENS * TOP_K,
        "error": ws.error_address,
        "load": weights.topology.load.data_ptr(),
        "stream": STREAM,
    }
    want.setdefault("h_sf", 0)
    want.setdefault("recv_block_sf", 0)
    assert args == want
    assert all(isinstance(args[n], float) for n, k in layout.LAUNCH_ARGS.items() if k == "f32")


def test_a_later_call_carries_nothing_over(gpu):
    weights = make_weights()
    ws = moe.Workspace(PROBLEM, device="cpu", debug=False)
    x, ids, topk_weights = make_inputs(5)
    out = torch.empty(8, 2 * HIDDEN, dtype=torch.bfloat16)[:, :HIDDEN]
    live = torch.tensor([3], dtype=torch.int32)
    moe.moe_forward(x, ids.long(), topk_weights.double(), weights, ws, out=out, num_tokens=live)
    y = moe.moe_forward(x, ids, topk_weights.half(), weights, ws)
    (_, first), (_, second) = gpu.calls
    assert first["num_tokens"] == live.data_ptr()
    assert (first["ids_words"], first["topk_weights_type"]) == (2, 3)
    assert (first["out"], first["out_stride"]) == (out.data_ptr(), 2 * HIDDEN)
    assert second["num_tokens"] == 0
    assert (second["ids_words"], second["topk_weights_type"]) == (1, 2)
    assert (second["out"], second["out_stride"]) == (y.data_ptr(), HIDDEN)
    assert len(gpu.loads) == 1


@pytest.mark.parametrize("per_token", [False, True], ids=["one-scale", "scale-per-token"])
def test_block_scaled_x(gpu, per_token):
    problem = PROBLEM.with_(format="nvfp4")
    weights = make_weights(problem)
    ws = moe.Workspace(problem, device="cpu", debug=False)
    x, ids, topk_weights = make_inputs(5)
    q = formats.quantize(x, "nvfp4", None if per_token else torch.tensor(0.01))
    moe.moe_forward(q, ids, topk_weights, weights, ws)
    facts, args = gpu.calls[0]
    assert facts["x_kind"] == "nvfp4"
    assert (args["x"], args["x_stride"]) == (q.data.data_ptr(), HIDDEN // 2)
    assert args["x_sf"] == q.sf.data_ptr()
    assert args["x_global_scale"] == q.global_scale.data_ptr()
    assert args["x_global_stride"] == int(per_token)


def test_zero_tokens_launch_the_chain_all_the_same(gpu):
    weights = make_weights()
    ws = moe.Workspace(PROBLEM, device="cpu", debug=False)
    y = moe.moe_forward(*make_inputs(0), weights, ws)
    assert y.shape == (0, HIDDEN)
    assert [args["tokens"] for _, args in gpu.calls] == [0]


def test_stages_run_their_bit_of_one_object(gpu):
    weights = make_weights()
    ws = moe.Workspace(PROBLEM, device="cpu", debug=False)
    x, ids, topk_weights = make_inputs(9)
    live = torch.tensor([3], dtype=torch.int32)
    y = moe.moe_forward(x, ids, topk_weights, weights, ws, num_tokens=live)
    whole = gpu.calls.pop()[1]
    moe.dispatch(x, ids, ws, weights, num_tokens=live)
    moe.gate_up(ws, weights)
    moe.down(ws, weights)
    assert ws.round.num_tokens is live  # its memory is read until combine has run
    apart = moe.combine(ids, topk_weights, ws, weights)
    assert apart.data_ptr() == y.data_ptr()
    assert [args.pop("stages") for _, args in gpu.calls] == [1, 2, 4, 8]
    assert gpu.calls[3][1] == {k: v for k, v in whole.items() if k != "stages"}
    assert len(gpu.loads) == 1


def test_rung_follows_the_tokens_and_config_overrides(gpu):
    weights = make_weights()
    ws = moe.Workspace(PROBLEM, device="cpu", debug=False)
    for tokens in (1, MAX_TOKENS, 1):
        moe.moe_forward(*make_inputs(tokens), weights, ws)
    small, large, again = (facts["config"]["tile_n"] for facts, _ in gpu.calls)
    assert small == again < large
    assert len(gpu.loads) == 2
    rung = variants.ladder("sm_90a", "e4m3")[-1]
    moe.moe_forward(*make_inputs(1), weights, ws, config=rung)
    assert gpu.calls[-1][0]["config"]["tile_n"] == rung.tile_n
    with pytest.raises(
        TypeError, match=r"config: expected .*sm90\.config\.Config or None, got int"
    ):
        moe.moe_forward(*make_inputs(1), weights, ws, config=3)
    with pytest.raises(TypeError, match="config: expected .* got dict"):
        moe.moe_forward(*make_inputs(1), weights, ws, config={})
    with pytest.raises(TypeError, match="config: expected .* got str"):
        moe.warmup(ws, weights, configs=["n8"])


def test_a_winner_is_taken_where_there_is_one_and_read_once(gpu, monkeypatch):
    *_, widest = variants.ladder("sm_90a", "e4m3")
    asked = []

    def winners(*args):
        asked.append(args)
        return {8: widest}

    monkeypatch.setattr(tuned, "winners", winners)
    weights = make_weights()
    ws = moe.Workspace(PROBLEM, device="cpu", debug=False)
    moe.warmup(ws, weights)
    gpu.capturing = True  # a winner is a rung of the ladder: nothing is left to load
    for tokens in (8, 5, 4, 9, 8):
        moe.moe_forward(*make_inputs(tokens), weights, ws)
    used = [facts["config"]["tile_n"] for facts, _ in gpu.calls]
    by_ladder = [variants.choose_rung(PROBLEM, "sm_90a", n, "e4m3").tile_n for n in (4, 9)]
    assert widest.tile_n not in by_ladder
    assert used == [widest.tile_n, widest.tile_n, *by_ladder, widest.tile_n]
    layer = tuned.layer_name(weights.problem, weights.kind)
    assert asked == [("sm_90a", "Some GPU", layer, "e4m3")]


def test_warmup_loads_the_ladder_and_later_calls_load_nothing(gpu):
    weights = make_weights()
    ws = moe.Workspace(PROBLEM, device="cpu", debug=False)
    moe.warmup(ws, weights, x_kinds=("bf16", "mxfp8"))
    rungs = variants.ladder("sm_90a", "e4m3")
    assert len(gpu.loads) == 2 * len(rungs)
    assert len(gpu.jobs) == 2 * len(rungs) - 1  # the first compiled in this process
    assert not gpu.calls
    gpu.capturing = True
    for tokens in (0, 1, 9, 64, MAX_TOKENS):
        moe.moe_forward(*make_inputs(tokens), weights, ws)
    assert len(gpu.loads) == 2 * len(rungs)


def test_warmup_finds_what_is_on_disk_and_starts_no_process(gpu):
    gpu.cached = True
    ws = moe.Workspace(PROBLEM, device="cpu", debug=False)
    moe.warmup(ws)
    assert {facts["kind"] for facts in gpu.loads} == {"mxfp8_row", "mxfp8_group128"}
    assert not gpu.jobs
    count = len(gpu.loads)
    weights = make_weights()
    gpu.capturing = True
    moe.moe_forward(*make_inputs(3), weights, ws)
    assert len(gpu.loads) == count


def test_cold_call_under_capture_is_refused_before_anything_changes(gpu):
    weights = make_weights()
    ws = moe.Workspace(PROBLEM, device="cpu", debug=True)
    inputs = make_inputs(3)
    gpu.capturing = True
    before, turn = ws.control().clone(), ws.turn
    for call in (
        lambda: moe.moe_forward(*inputs, weights, ws),
        lambda: moe.dispatch(*inputs[:2], ws, weights),
        lambda: moe.warmup(ws, weights),
    ):
        with pytest.raises(RuntimeError, match=r"call moe_ep_jit\.warmup\(ws, weights\) before"):
            call()
    assert not gpu.loads
    assert not gpu.calls
    assert (ws.turn, ws.round) == (turn, None)
    assert torch.equal(ws.control(), before)
    gpu.capturing = False
    moe.warmup(ws, weights)
    gpu.capturing = True
    moe.moe_forward(*inputs, weights, ws)
    assert len(gpu.calls) == 1
    moe.warmup(ws, weights)  # nothing is left to load
    with pytest.raises(RuntimeError, match="build the workspace, .* before the capture"):
        moe.Workspace(PROBLEM, device="cpu")


def test_two_streams_are_explained_and_the_workspace_recovers(gpu):
    weights = make_weights()
    ws = moe.Workspace(PROBLEM, device="cpu", debug=False)
    control = ws.control()
    control.fill_(1)
    ws._record[layout.ERROR_CODE] = layout.ERROR_TWO_STREAMS
    with pytest.raises(RuntimeError, match="one stream at a time"):
        moe.moe_forward(*make_inputs(3), weights, ws)
    assert not gpu.calls
    assert control[layout.CONTROL_IN_FLIGHT] == 0
    assert control[layout.CONTROL_SATURATED] == ws.saturated_blocks() == 1
    moe.moe_forward(*make_inputs(3), weights, ws)
    assert len(gpu.calls) == 1


def test_an_error_found_under_capture_stays_for_the_next_call(gpu):
    weights = make_weights()
    ws = moe.Workspace(PROBLEM, device="cpu", debug=False)
    moe.warmup(ws, weights)
    ws._record[layout.ERROR_CODE] = layout.ERROR_TWO_STREAMS
    ws.control().fill_(1)
    for gpu.capturing in (True, False):
        with pytest.raises(RuntimeError, match="one stream at a time"):
            moe.moe_forward(*make_inputs(3), weights, ws)
    assert ws.control()[layout.CONTROL_IN_FLIGHT] == 0
    moe.moe_forward(*make_inputs(3), weights, ws)


def test_launch_guards_the_device_only_when_another_is_current(gpu, monkeypatch):
    guarded = []

    class Guard:
        def __init__(self, index):
            guarded.append(index)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            return None

    monkeypatch.setattr(torch.cuda, "device", Guard)
    weights = make_weights()
    ws = moe.Workspace(PROBLEM, device="cpu", debug=False)
    moe.moe_forward(*make_inputs(3), weights, ws)
    assert not guarded
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    moe.moe_forward(*make_inputs(3), weights, ws)
    assert guarded == [None]
    assert len(gpu.calls) == 2


def test_workspace_memory_is_one_aligned_piece_with_control_zeroed(gpu):
    problems = [PROBLEM, PROBLEM.with_(format="nvfp4", hidden=320, top_k=3)]
    ws = moe.Workspace(problems, device="cpu", debug=False)
    assert ws.base_address % layout.REGION_ALIGN == 0
    assert (ws.control() == 0).all()
    for problem in problems:
        views = ws.views(problem)
        assert views["output"].shape == (MAX_TOKENS, problem.hidden)
        operand = variants.operand_of(problem)
        for name, region in layout.regions(problem, operand).items():
            assert tuple(views[name].shape) == region.shape
            assert views[name].data_ptr() == ws.base_address + region.offset
        last = list(views.values())[-1]
        assert last.data_ptr() + last.nbytes <= ws.base_address + ws.nbytes_regions
    assert gpu.synchronized


def test_weights_that_need_a_larger_operand_are_refused_with_the_way_out(gpu):
    weights = make_weights()
    weights.kind = "mxfp8_exact"
    assert weights.operand == "bf16"
    ws = moe.Workspace(PROBLEM, device="cpu", debug=False)
    with pytest.raises(ValueError, match=r"operand=weights\.operand"):
        moe.moe_forward(*make_inputs(3), weights, ws)
    ws = moe.Workspace(PROBLEM, device="cpu", debug=False, operand="bf16")
    moe.moe_forward(*make_inputs(3), weights, ws)
    assert gpu.calls[0][0]["kind"] == "mxfp8_exact"
    assert gpu.calls[0][1]["h_sf"] == 0


def test_weights_for_the_reference_are_refused_on_kernels(gpu):
    plain = make_weights()
    plain.arch, plain.layout = None, "plain"
    ws = moe.Workspace(PROBLEM, device="cpu", debug=False)
    with pytest.raises(ValueError, match="expected the layout of sm_90a, got layout 'plain'"):
        moe.moe_forward(*make_inputs(3), plain, ws)


def test_weights_kinds_cover_what_preparation_can_decide():
    act = PROBLEM.with_(act="bf16")
    assert launch.weights_kinds("sm_90a", PROBLEM, "e4m3") == ("mxfp8_row", "mxfp8_group128")
    assert launch.weights_kinds("sm_90a", PROBLEM, "bf16") == ("mxfp8_exact",)
    assert launch.weights_kinds("sm_90a", act, "bf16") == ("mxfp8_exact",)
    assert launch.weights_kinds("sm_90a", PROBLEM.with_(format="nvfp4"), "bf16") == ("nvfp4",)
    assert launch.weights_kinds("sm_100a", PROBLEM, "mxfp8") == ("mxfp8",)
    assert launch.weights_kinds("sm_103a", PROBLEM.with_(format="nvfp4"), "nvfp4") == ("nvfp4",)
