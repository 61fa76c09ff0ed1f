"""A simulated CUDA device: tensors that say they are on cuda:0, hold their values on the CPU, and are counted.

    launches    operations that would start a kernel: everything but views and uninitialised memory
    syncs       what makes the host wait: a value read (item, tolist, bool), shapes that depend on values (nonzero,
                boolean masks, bincount), an event, a copy between the devices unless it is non_blocking and from
                pinned memory
    mixes       a RuntimeError, as on a real device, where an operation gets tensors of both devices; a CPU scalar may
                come with device tensors, and indices from the CPU are copied, which is a sync
    streams     operations belong to the stream of their thread; a RuntimeError where one uses what another stream wrote
                and its own has not waited for since, or whose memory that stream may take back (`record_stream`)
    graphs      `torch.cuda.graph` records operations, and a replay repeats them in the same memory as one launch; a
                wait or a copy from the host while recording is a RuntimeError

To PyTorch's C++ a `DeviceTensor` is a CPU tensor, so that autograd runs through it; Python's `device` says cuda:0. What
CUDA computes in one kernel and the CPU in several (RMSNorm, attention) is one launch where gradients are off. Paged
attention is an operation in place of its Triton kernels. Others that only a GPU has (Triton's loss, compiled
FlexAttention) are not simulated: a test puts one operation in their place.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

import outrider.target.paged_attention as paged_attention
from outrider.target.paged_attention import Plan, Reader
from tests.toys.paged_reference import dense

CUDA = torch.device("cuda", 0)

# One kernel on CUDA; PyTorch has no derivative of them below their parts, so they are whole only without gradients.
_FUSED = {"aten::rms_norm", "aten::scaled_dot_product_attention"}
_NO_KERNEL = {
    "aten::_unsafe_view",
    "aten::empty",
    "aten::empty_like",
    "aten::empty_strided",
    "aten::new_empty",
    "aten::new_empty_strided",
    "aten::lift_fresh",
    "aten::set_",
}
_INDEXING = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_", "aten::_unsafe_index"}
_VALUE_DEPENDENT = {
    "aten::nonzero",
    "aten::masked_select",
    "aten::unique_dim",
    "aten::_unique",
    "aten::_unique2",
    "aten::unique_consecutive",
    "aten::bincount",
    "aten::equal",
    "aten::_local_scalar_dense",
}
_COPIES = {"aten::_to_copy", "aten::copy_", "aten::copy"}


class Counts:
    """What happened on the device since `reset`: launches by operation, syncs by (kind, place in the package)."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.operations: Counter[str] = Counter()
        self.places: Counter[tuple[str, str]] = Counter()

    @property
    def launches(self) -> int:
        return self.operations.total()

    @property
    def syncs(self) -> int:
        return self.places.total()

    def sync(self, kind: str) -> None:
        if _device is not None and _device.recording:
            raise RuntimeError(f"operation not permitted when stream is capturing: {kind}, at {_place()}")
        self.places[kind, _place()] += 1
        if _device is not None:
            _device.finished = _device.recorded

    def report(self) -> str:
        """The syncs by place and the commonest operations, for the message of a failed budget."""
        lines = [f"{count:5d} {kind:24s} {place}" for (kind, place), count in self.places.most_common()]
        return "\n".join([*lines, f"{self.launches} launches: {dict(self.operations.most_common(12))}"])


def _place() -> str:
    """The innermost line of the package on the stack, as room/file.py:line."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if "/src/outrider/" in name:
            return f"{name.split('/src/outrider/')[1]}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "outside the package"


class DeviceTensor(Tensor):
    """A tensor of the simulated device. `held`: its values, on the CPU."""

    held: Tensor
    made: _Stream  # what it was made on and reuses its memory, or what its memory waits for
    written: tuple[_Stream, int]  # the stream that wrote it last, and its operation

    @staticmethod
    def __new__(cls, values: Tensor, requires_grad: bool = False) -> DeviceTensor:
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            values.size(),
            strides=values.stride(),
            storage_offset=values.storage_offset(),
            dtype=values.dtype,
            layout=values.layout,
            device="cpu",
            requires_grad=requires_grad,
        )
        made.held = values
        made.made = _current_stream()
        made.written = made.made, made.made.operations
        return made

    def __init__(self, values: Tensor, requires_grad: bool = False) -> None:
        super().__init__()

    device = property(lambda self: CUDA)  # type: ignore[assignment]
    is_cuda = property(lambda self: True)  # type: ignore[assignment]
    is_cpu = property(lambda self: False)  # type: ignore[assignment]

    def record_stream(self, s: Any) -> None:
        self.made = s

    def __repr__(self) -> str:  # type: ignore[override]
        return f"DeviceTensor({self.held!r})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        copy: Tensor = DeviceTensor(self.held.clone())
        if isinstance(self, nn.Parameter):
            copy = nn.Parameter(copy, requires_grad=self.requires_grad)
        memo[id(self)] = copy
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:  # in a file it is a tensor of the CPU
        return self.held.__reduce_ex__(protocol)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        handler = _METHODS.get(func)
        if handler is not None:
            return handler(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():  # results are of this class where an operation made them so
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert _device is not None, "a tensor of the simulated device is used outside of it"
        return _device.run(func, args, kwargs or {})


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _held(tree: Any) -> Any:
    return tree_map(lambda leaf: leaf.held if isinstance(leaf, DeviceTensor) else leaf, tree)


def _names(func: Any) -> set[str]:
    return {argument.name for argument in func._schema.arguments}


def _on_device(device: Any) -> bool:
    return device is not None and torch.device(device).type == "cuda"


# ----------------------------------------------------------------------------
# What Python asks of a tensor before any operation is dispatched: C++ takes it for a tensor of the CPU.
# ----------------------------------------------------------------------------


def _to(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    like = next((arg for arg in args if isinstance(arg, Tensor)), kwargs.pop("other", None))
    if like is not None:
        rest = [arg for arg in args if arg is not like]
        return _to(self, like.device, like.dtype, *rest, **kwargs)
    copy = kwargs.pop("copy", False)
    device, dtype, non_blocking, memory_format = torch._C._nn._parse_to(*args, **kwargs)
    there = isinstance(self, DeviceTensor)
    if device is not None and _on_device(device) != there:
        return torch.ops.aten._to_copy.default(
            self, dtype=dtype or self.dtype, device=device, non_blocking=bool(non_blocking)
        )
    if not copy and (dtype is None or dtype == self.dtype) and memory_format is None:
        return self
    return torch.ops.aten._to_copy.default(self, dtype=dtype or self.dtype)


def _counted_read(read: Callable[[Tensor], Any], kind: str) -> Callable[..., Any]:
    def counted(self: DeviceTensor, *args: Any, **kwargs: Any) -> Any:
        _counts().sync(kind)
        return read(self.held.detach())

    return counted


def _numpy(self: Tensor, *, force: bool = False) -> Any:
    if not force:
        return _refused_numpy(self)
    _counts().sync("numpy")
    return self.held.detach().numpy()  # type: ignore[attr-defined]


def _refused_numpy(self: Tensor, *_: Any, **__: Any) -> Any:
    raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first.")


def _new_tensor(self: Tensor, data: Any, *, dtype: torch.dtype | None = None, **kwargs: Any) -> Tensor:
    return _to(torch.tensor(data, dtype=dtype or self.dtype), CUDA)


_METHODS: dict[Any, Callable[..., Any]] = {
    torch.Tensor.to: _to,
    torch.Tensor.cpu: lambda self, *_, **__: _to(self, "cpu"),
    torch.Tensor.cuda: lambda self, *_, **__: self,
    torch.Tensor.tolist: _counted_read(lambda values: values.tolist(), "tolist"),
    torch.Tensor.numpy: _numpy,
    torch.Tensor.__format__: lambda self, spec: _counted_read(lambda values: format(values.item(), spec), "item")(self),
    torch.Tensor.__array__: _refused_numpy,
    torch.Tensor.new_tensor: _new_tensor,
    torch.Tensor.is_pinned: lambda self, *_: False,
    torch.Tensor.untyped_storage: lambda self: self.held.untyped_storage(),
    torch.Tensor.data_ptr: lambda self: self.held.data_ptr(),
}


def _pin_memory(self: Tensor, *_: Any) -> Tensor:
    assert not isinstance(self, DeviceTensor), "only memory of the host can be pinned"
    return self if _pinned(self) else _pin(self.clone())


def _pin(tensor: Tensor) -> Tensor:
    assert _device is not None, "outside of the simulated device"
    _device.pinned[tensor.untyped_storage().data_ptr()] = tensor  # kept, so that no other tensor gets its memory
    return tensor


def _pinned(tensor: Tensor) -> bool:
    return _device is not None and tensor.untyped_storage().data_ptr() in _device.pinned


class _OntoDevice(TorchFunctionMode):
    """What puts values on the device: C++ would ask for the device itself before it dispatches anything."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.tensor, torch.as_tensor) and _on_device(kwargs.get("device")):
            if isinstance(args[0], DeviceTensor):
                return _to(args[0], dtype=kwargs.get("dtype"))
            return _to(func(*args, **{**kwargs, "device": "cpu"}), CUDA)
        if func is torch.Tensor.to:
            return _to(*args, **kwargs)
        if func is torch.Tensor.cuda:
            return _to(args[0], CUDA, **kwargs)
        if func is torch.Tensor.pin_memory:
            return _pin_memory(*args)
        if func is torch.Tensor.is_pinned:
            return _pinned(args[0])
        if kwargs.get("pin_memory"):
            return _pin(func(*args, **{**kwargs, "pin_memory": False}))
        return func(*args, **kwargs)


# ----------------------------------------------------------------------------
# The operations.
# ----------------------------------------------------------------------------


class SimulatedDevice(TorchDispatchMode):
    """Runs every operation, and counts those of the device in `counts`."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counts()
        self.pinned: dict[int, Tensor] = {}
        self.tape: list[tuple[Callable[[], Any], Any]] | None = None  # of the graph that is captured
        self.capturing = 0  # the thread that captures it
        self.recorded = self.finished = 0  # events, in order
        self.default_stream = _Stream()
        self.thread = threading.local()  # its `stream`, where it has another one

    @property
    def recording(self) -> bool:
        """Whether this thread captures a graph."""
        return self.tape is not None and self.capturing == threading.get_ident()

    @contextmanager
    def as_one(self, name: str) -> Iterator[None]:
        """Whatever runs inside is one launch without syncs: a kernel that is not simulated."""
        before = Counter(self.counts.operations), Counter(self.counts.places)
        try:
            yield
        finally:
            self.counts.operations, self.counts.places = before
            self.counts.operations[name] += 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.run(func, args, kwargs or {})

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        name = func._schema.name
        given = _tensors((args, kwargs))
        here = [tensor for tensor in given if isinstance(tensor, DeviceTensor)]
        cpu = [tensor for tensor in given if not isinstance(tensor, DeviceTensor)]
        asked = kwargs.get("device")
        if not here and not _on_device(asked):
            return func(*args, **kwargs)
        if name not in _FUSED and name not in _COPIES and func._can_decompose():
            with self:
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        self._check_devices(name, args, here, cpu)
        self._check_streams(name, here)
        self._count_syncs(name, args, kwargs, here=here, cpu=cpu)
        kwargs_cpu = {**kwargs, "device": torch.device("cpu")} if asked is not None else kwargs
        held_args, held_kwargs = _held(args), _held(kwargs_cpu)

        def compute() -> Any:
            if name == "aten::mm" and "out_dtype" in _names(func):  # of CUDA alone: sums and result in a wider type
                wide = args[2] if len(args) > 2 else kwargs["out_dtype"]
                return held_args[0].to(wide) @ held_args[1].to(wide)
            return func(*held_args, **held_kwargs)

        out = compute()
        if self.tape is not None and self.recording:
            self.tape.append((compute, out))
        if name == "aten::_to_copy" and here and asked is not None and not _on_device(asked):
            return out
        return self._result(func, args, kwargs, out)

    def _check_devices(self, name: str, args: Any, here: list[DeviceTensor], cpu: list[Tensor]) -> None:
        others = [tensor for tensor in cpu if tensor.dim() > 0]
        if not here or not others or name in _COPIES:
            return
        if name in _INDEXING and isinstance(args[0], DeviceTensor):
            values = args[2] if len(args) > 2 else None
            if not isinstance(values, Tensor) or isinstance(values, DeviceTensor) or values.dim() == 0:
                return  # indices alone may come from the CPU
        raise RuntimeError(
            f"{name}: expected all tensors to be on the same device, but found cuda:0 and cpu, at {_place()}"
        )

    def _check_streams(self, name: str, here: list[DeviceTensor]) -> None:
        stream = _current_stream()
        stream.operations += 1
        for tensor in here:
            writer, operation = tensor.written
            if writer is not stream and stream.waited.get(writer, -1) < operation:
                raise RuntimeError(f"{name}: a stream reads what another one may not have written yet, at {_place()}")
            if tensor.made is not stream:
                raise RuntimeError(f"{name}: a stream reads memory that is another one's to reuse, at {_place()}")

    def _count_syncs(self, name: str, args: Any, kwargs: Any, *, here: list[DeviceTensor], cpu: list[Tensor]) -> None:
        counts = self.counts
        if name in _VALUE_DEPENDENT:
            counts.sync(name.removeprefix("aten::"))
        elif name == "aten::repeat_interleave":
            if kwargs.get("output_size") is None:
                counts.sync("repeat_interleave")
        elif name in _INDEXING:
            for index in args[1]:
                if isinstance(index, DeviceTensor) and index.dtype in (torch.bool, torch.uint8):
                    counts.sync("boolean mask")
                elif isinstance(index, Tensor) and not isinstance(index, DeviceTensor):
                    counts.sync("index from the host")
        elif name in _COPIES:
            self._count_copy(name, args, kwargs, here=here, cpu=cpu)

    def _count_copy(self, name: str, args: Any, kwargs: Any, *, here: list[DeviceTensor], cpu: list[Tensor]) -> None:
        if name == "aten::_to_copy":
            there, source = _on_device(kwargs.get("device", args[0].device)), args[0]
            non_blocking = kwargs.get("non_blocking", False)
        else:
            there, source = isinstance(args[0], DeviceTensor), args[1]
            non_blocking = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
        if there == isinstance(source, DeviceTensor):
            return
        if not there:
            if not (non_blocking and name == "aten::copy_" and _pinned(args[0])):
                self.counts.sync("device to host")
        elif not (non_blocking and _pinned(source)):
            self.counts.sync("host to device")
        elif self.recording:
            raise RuntimeError(f"a copy from the host in a CUDA graph, at {_place()}")

    def _result(self, func: Any, args: Any, kwargs: Any, out: Any) -> Any:
        """What was computed, as tensors of the device; written arguments are returned as they are."""
        name, schema = func._schema.name, func._schema
        views = any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
        if (_tensors(out) and not views and name not in _NO_KERNEL) or not schema.returns:
            self.counts.operations[name] += 1
        written = {}
        for argument, value in zip(schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                written[frozenset(argument.alias_info.before_set)] = value
        for argument in schema.arguments:
            if argument.name in kwargs and argument.alias_info is not None and argument.alias_info.is_write:
                written[frozenset(argument.alias_info.before_set)] = kwargs[argument.name]
        for value in _tensors(list(written.values())):
            if isinstance(value, DeviceTensor):
                value.written = _current_stream(), _current_stream().operations
        if schema.is_mutable and written:
            results = [
                written[frozenset(r.alias_info.before_set)] if r.alias_info is not None else None
                for r in schema.returns
            ]
            if all(result is not None for result in results):
                return results[0] if len(results) == 1 else tuple(results) if results else None
        # A view of an ordinary tensor is an ordinary tensor, in inference mode too.
        ordinary = views and not args[0].is_inference() and torch.is_inference_mode_enabled()
        with torch.inference_mode(False) if ordinary else nullcontext():
            return tree_map(lambda leaf: DeviceTensor(leaf) if isinstance(leaf, Tensor) else leaf, out)


class _Graph:
    """torch.cuda.CUDAGraph: the operations that were recorded, repeated in the memory of their results."""

    tape: list[tuple[Callable[[], Any], Any]]

    def replay(self) -> None:
        assert _device is not None, "outside of the simulated device"
        with torch.inference_mode(), torch._C._DisableTorchDispatch():
            for compute, out in self.tape:
                for again, before in zip(_tensors(compute()), _tensors(out), strict=True):
                    if again.data_ptr() != before.data_ptr():  # neither a view nor what was written in place
                        before.copy_(again)
        _device.counts.operations["graph"] += 1


@contextmanager
def _captured(graph: _Graph, pool: Any = None, **_: Any) -> Iterator[None]:
    """torch.cuda.graph, which waits for the device when it begins."""
    assert _device is not None and _device.tape is None, "one graph is captured at a time"
    _device.counts.sync("capture")
    _device.tape, _device.capturing = [], threading.get_ident()
    graph.tape = _device.tape
    launches = Counter(_device.counts.operations)
    try:
        yield
    finally:
        _device.tape = None
        _device.counts.operations = launches  # nothing runs while a graph is captured


class _Event:
    """torch.cuda.Event: complete once the host has waited for it, for a later event or, after it, for anything else."""

    def __init__(self, enable_timing: bool = False, **_: Any) -> None:
        self._order, self._time = 0, -1.0

    def record(self, stream: _Stream | None = None) -> None:
        assert _device is not None, "outside of the simulated device"
        _device.recorded += 1
        self._order, self._time = _device.recorded, time.perf_counter()
        self.stream = stream or _current_stream()
        self.operation = self.stream.operations

    def query(self) -> bool:
        return _device is not None and _device.finished >= self._order

    def synchronize(self) -> None:
        if not self.query():
            assert _device is not None, "outside of the simulated device"
            _counts().sync("event")
            _device.finished = self._order  # what was recorded later may be under way

    def elapsed_time(self, end: _Event) -> float:
        return 1000 * (end._time - self._time)


class _Stream:
    """torch.cuda.Stream. `waited`: of other streams, the last operation that its next ones come after."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.operations = 0
        self.waited: dict[_Stream, int] = {}

    def synchronize(self) -> None:
        _counts().sync("stream")

    def wait_event(self, event: _Event) -> None:
        self.waited[event.stream] = max(event.operation, self.waited.get(event.stream, -1))


def _current_stream(*_: Any) -> _Stream:
    assert _device is not None, "outside of the simulated device"
    stream: _Stream = getattr(_device.thread, "stream", _device.default_stream)
    return stream


@contextmanager
def _on_stream(stream: _Stream) -> Iterator[None]:
    """torch.cuda.stream."""
    assert _device is not None, "outside of the simulated device"
    before, _device.thread.stream = _current_stream(), stream
    try:
        yield
    finally:
        _device.thread.stream = before


class _InThread(TorchDispatchMode):
    """The device in another thread than the one that simulates it: modes are a thread's own."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {})) if _device is None else _device.run(func, args, kwargs or {})


_run_thread = threading.Thread.run


def _run_with_device(thread: threading.Thread) -> None:
    with _InThread(), _OntoDevice():
        _run_thread(thread)


_device: SimulatedDevice | None = None


def _counts() -> Counts:
    assert _device is not None, "outside of the simulated device"
    return _device.counts


# ----------------------------------------------------------------------------
# Paged attention (target/paged_attention.py), computed densely from what its plan says. It is an operation, so that
# graphs record it and read the plan of their replay.
# ----------------------------------------------------------------------------

_library = torch.library.Library("simulated", "DEF")
_library.define(
    "paged_attention(Tensor q, Tensor keys, Tensor values, Tensor rows, Tensor requests, Tensor items, Tensor pages, "
    "Tensor? sinks, Tensor(a!) out, int page_size, int? window, bool drafts, float scale, float? softcap) -> ()"
)


def _attend_densely(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    rows: Tensor,
    requests: Tensor,
    items: Tensor,
    pages: Tensor,
    sinks: Tensor | None,
    out: Tensor,
    *own: Any,
) -> None:
    page_size, window, drafts, scale, softcap = own
    readers, first = [], 0
    for first_row, count, past, first_page, slots, _ in requests[requests[:, 1] > 0].tolist():
        assert first_row == first, "rows of requests follow each other"
        positions, sees, _ = rows[first : (first := first + count)].T
        used = -(-min(past + count, slots or past + count) // page_size)
        table = pages[first_page : first_page + used].tolist()
        readers.append(Reader(past, positions.tolist(), table, sees.numpy(), slots))
    wide = torch.promote_types(q.dtype, torch.float32)
    out[:first] = dense(
        q[:first].to(wide),
        keys.to(wide),
        values.to(wide),
        readers=readers,
        page_size=page_size,
        window=window,
        drafts=drafts,
        scale=scale,
        softcap=softcap,
        sinks_H=sinks,
    )


_library.impl("paged_attention", _attend_densely, "CPU")


def _paged_attention(
    q_THE: Tensor,
    keys_KSE: Tensor,
    values_KSE: Tensor,
    *,
    plan: Plan,
    scale: float,
    softcap: float | None,
    sinks_H: Tensor | None,
    out_THE: Tensor,
) -> None:
    tables = plan.rows_T3, plan.requests_R6, plan.items_W4, plan.pages_P
    options = plan.page_size, plan.window, plan.drafts, scale, softcap
    torch.ops.simulated.paged_attention(q_THE, keys_KSE, values_KSE, *tables, sinks_H, out_THE, *options)
    _counts().operations["combine"] += plan.split


_grouped: Any = torch._C._group_tensors_by_device_and_dtype


def _group_tensors(*args: Any, **kwargs: Any) -> Any:
    """The optimizer's and the clipping's groups of tensors, under the device that Python knows."""
    groups = _grouped(*args, **kwargs)
    return {(lists[0][0][0].device, dtype): lists for (_, dtype), lists in groups.items()}


class _Autocast(torch.autocast):
    """Autocast of the device, which C++ takes for the CPU's."""

    def __init__(self, device_type: str, *args: Any, **kwargs: Any) -> None:
        super().__init__("cpu" if device_type == "cuda" else device_type, *args, **kwargs)


@contextmanager
def simulated_device() -> Iterator[SimulatedDevice]:
    """Inside, `torch.device("cuda")` is the simulated device."""
    global _device
    assert _device is None, "there is one simulated device"
    device = SimulatedDevice()
    before = torch.__future__.get_overwrite_module_params_on_conversion()
    with ExitStack() as stack:
        stack.callback(_leave, before)
        _device = device
        for name, value in (
            ("_lazy_init", lambda: None),
            ("is_available", lambda: True),
            ("device_count", lambda: 1),
            ("current_device", lambda: 0),
            ("set_device", lambda *_: None),
            ("current_stream", _current_stream),
            ("Stream", _Stream),
            ("stream", _on_stream),
            ("is_bf16_supported", lambda *_, **__: True),
            ("get_device_name", lambda *_: "simulated"),
            ("get_device_capability", lambda *_: (9, 0)),
            ("max_memory_allocated", lambda *_: 0),
            ("mem_get_info", lambda *_: (2**36, 2**37)),
            ("synchronize", lambda *_: device.counts.sync("synchronize")),
            ("Event", _Event),
            ("CUDAGraph", _Graph),
            ("graph", _captured),
            ("graph_pool_handle", lambda: (0, 0)),
        ):
            stack.enter_context(patch.object(torch.cuda, name, value))
        stack.enter_context(patch.object(paged_attention, "_kernel", lambda: _paged_attention))
        stack.enter_context(patch.object(paged_attention, "_has_triton", lambda: True))
        stack.enter_context(patch.object(torch, "autocast", _Autocast))
        stack.enter_context(patch.object(threading.Thread, "run", _run_with_device))
        stack.enter_context(patch.object(torch._C, "_group_tensors_by_device_and_dtype", _group_tensors))
        torch.__future__.set_overwrite_module_params_on_conversion(True)
        stack.enter_context(device)
        stack.enter_context(_OntoDevice())
        yield device


def _leave(overwrite: bool) -> None:
    """Nothing is on the device any more, whatever failed on the way there."""
    global _device
    _device = None
    torch.__future__.set_overwrite_module_params_on_conversion(overwrite)
