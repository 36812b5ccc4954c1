"""An accelerator that is not there: what the host waits for, what is copied, and how much memory is held.

Tensors are torch's fake tensors on `cuda` (FakeTensorMode), each with its value after it on the host. Every
operation runs twice: on the fake tensors, which say what comes out and refuse to mix devices as CUDA does,
and on the values, which answer where the host reads a result. So the code under test goes its own way, as it
would on a GPU.
"""

import re
import sys
import weakref

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

aten = torch.ops.aten
HOST, DEVICE = torch.device("cpu"), torch.device("cuda", 0)
INDEXING = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default}


class Accelerator(TorchDispatchMode):
    """Torch with one accelerator; used as a context.

    Attributes:
        waits: the functions that wait until the device has done all that it was given, once for each time.
        log: what was launched, by name, and each "wait", in this order.
        num_sent: copies to the device that nothing waits for: of pinned memory, `non_blocking`.
        operations: what ran on the device, with the functions that called it.
        peak: the most bytes that tensors made there have held at one time. What an operation takes inside is
            not seen.
    """

    def __init__(self):
        super().__init__()
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._made: list[weakref.ref[FakeTensor]] = []
        self.operations: set[tuple[torch._ops.OpOverload, str]] = set()
        self.start()

    def start(self):
        """Count from here on, and memory beyond what is held now."""
        self.waits: list[str] = []
        self.log: list[str] = []
        self.num_sent = 0
        self._held, self.peak = self._num_bytes(), 0

    def wait(self):
        self.waits.append(place())
        self.log.append("wait")

    def __enter__(self):
        self._fake.__enter__()
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        self._fake.__exit__(*error)

    def put(self, value):
        """A tensor on the device with this value; not counted as a copy."""
        with self._fake:
            tensor = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=DEVICE)
        return self._with_value(tensor, value)

    def __torch_dispatch__(self, func, kinds, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default:
            return args[0].fake_device
        if func is aten.is_pinned.default:
            return getattr(args[0], "pinned", False)
        given = [x for x in tree_leaves((args, kwargs)) if torch.is_tensor(x)]
        if func is aten._pin_memory.default and is_there(args[0]):
            raise RuntimeError("cannot pin a tensor on cuda: only dense CPU tensors can be pinned")
        values = _run_on_host(func, args, kwargs)
        if kwargs.get("device", HOST).type == "cpu" and not any(map(is_there, given)):
            return values
        if func is aten._to_copy.default:
            results = self._copied(args[0], kwargs, values)
        elif func is aten.copy_.default:
            blocking = not (kwargs.get("non_blocking") or args[2:] == (True,))
            self._count_copy(args[1], is_there(args[0]), blocking)
            results = args[0]
        else:
            self.operations.add((func, place()))
            self.log.append(func.overloadpacket.__name__)
            results = self._computed(func, args, kwargs, given, values)
        self.peak = max(self.peak, self._num_bytes() - self._held)
        return results

    def _copied(self, source, kwargs, value):
        to_device = kwargs.get("device", source.device).type != "cpu"
        self._count_copy(source, to_device, not kwargs.get("non_blocking"))
        return self.put(value) if to_device else value

    def _count_copy(self, source, to_device, blocking):
        if to_device and is_there(source):
            return
        if blocking or (to_device and not getattr(source, "pinned", False)):
            self.wait()
        elif to_device:
            self.num_sent += 1

    def _computed(self, func, args, kwargs, given, values):
        if func in INDEXING:  # CUDA copies what is on the host, a number to be put there as well
            for _ in range(sum(not is_there(x) for x in given)):
                self.wait()
        if _depends_on_values(func, args, kwargs):
            self.wait()
            there = {id(x.value): x for x in given if is_there(x)}  # what is changed in place
            return tree_map(lambda x: there.get(id(x)) or self.put(x) if torch.is_tensor(x) else x, values)
        results = func(*args, **kwargs)
        for result, value in zip(tree_leaves(results), tree_leaves(values), strict=True):
            assert (result.shape, result.dtype, is_there(result)) == (value.shape, value.dtype, True), func
            self._with_value(result, value)
        return results

    def _with_value(self, tensor, value):
        tensor.value = value
        self._made.append(weakref.ref(tensor))
        return tensor

    def _num_bytes(self):
        alive = [(ref, tensor) for ref in self._made if (tensor := ref()) is not None]
        self._made = [ref for ref, _ in alive]
        storages = [tensor.value.untyped_storage() for _, tensor in alive]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def is_there(x):
    return isinstance(x, FakeTensor)


def place():
    """The function of this package or of vLLM that is running, with its module; else the outermost."""
    frame = sys._getframe()
    while frame.f_back and frame.f_globals["__name__"].partition(".")[0] not in ("rollout_spec", "vllm"):
        frame = frame.f_back
    name = re.sub("^x_(.*)__mutmut_.*", r"\1", frame.f_code.co_name)  # as it was before `make mutants`
    return f"{frame.f_globals['__name__']}.{name}"


def _run_on_host(func, args, kwargs):
    on_host = {name: HOST if name == "device" else value for name, value in kwargs.items()}
    is_pinned = on_host.pop("pin_memory", False) or func is aten._pin_memory.default
    with unset_fake_temporarily():  # pinning takes a GPU
        run = torch.clone if func is aten._pin_memory.default else func
        values = run(*tree_map(_value, args), **tree_map(_value, on_host))
    if is_pinned:
        values.pinned = True
    return values


def _value(x):
    return x.value if is_there(x) else x


def _depends_on_values(func, args, kwargs):
    """Whether the host has to read the device before it knows what comes out."""
    if func in INDEXING:
        return any(index is not None and index.dtype == torch.bool for index in args[1])
    if func is aten.repeat_interleave.Tensor:
        return kwargs.get("output_size") is None
    return bool({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(func.tags))
