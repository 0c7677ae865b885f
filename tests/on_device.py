"""Make a call whose arguments lie on the CPU on another device, as if they lay there.

Every storage is copied whole, so that strides, offsets, alignment, aliases and the poison around a
view are the same there; afterwards every storage is copied back, and results come back as CPU
tensors (an argument that comes back is that argument). Objects that hold tensors (schedules, plans,
caches, pools) are copied attribute by attribute.
"""

import copy

import torch

from headstart import Workspace


class _Copies:
    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.storages: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        self.copied: dict[int, object] = {}
        self.originals: dict[int, object] = {}
        self.alive: list[object] = []

    def there(self, value):
        """`value` with everything in it on the device."""
        if isinstance(value, torch.Tensor):
            return self._remember(value, self._tensor) if value.device.type == "cpu" else value
        if isinstance(value, torch.device):
            return self.device if value.type == "cpu" else value
        if isinstance(value, Workspace):
            return value  # it is of the device already
        if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
            return type(value)(self.there(item) for item in value)
        if isinstance(value, dict):
            return {key: self.there(item) for key, item in value.items()}
        if type(value).__module__.startswith("headstart.") and hasattr(value, "__dict__"):
            return self._remember(value, self._object)
        return value

    def here(self, value):
        """A result on the CPU."""
        if isinstance(value, torch.Tensor):
            return self.originals[id(value)] if id(value) in self.originals else value.cpu()
        if isinstance(value, tuple):
            items = [self.here(item) for item in value]
            return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
        return value

    def bring_back(self):
        """Copy every storage to where it came from."""
        for source, copied in self.storages.values():
            source.copy_(copied)

    def _remember(self, value, make):
        if id(value) not in self.copied:
            self.alive.append(value)
            made = self.copied[id(value)] = make(value)
            self.originals[id(made)] = value
        return self.copied[id(value)]

    def _tensor(self, tensor):
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self.storages:
            there = torch.UntypedStorage(storage.nbytes(), device=self.device)
            there.copy_(storage)
            self.storages[key] = (storage, there)
        made = torch.zeros(0, dtype=tensor.dtype, device=self.device)
        place = (tensor.storage_offset(), tensor.shape, tensor.stride())
        made.set_(self.storages[key][1], *place)
        return made.requires_grad_() if tensor.requires_grad else made

    def _object(self, value):
        made = copy.copy(value)
        for name, item in vars(value).items():
            object.__setattr__(made, name, self.there(item))
        return made


def on_device(device, function, *args, **kwargs):
    """`function(*args, **kwargs)` computed on `device`."""
    copies = _Copies(device)
    try:
        return copies.here(function(*copies.there(args), **copies.there(kwargs)))
    finally:
        copies.bring_back()
