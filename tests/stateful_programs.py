"""Programs that keep state in every place where a module can: each is plain code that is right without remat."""

from types import SimpleNamespace
from typing import Any

import torch
from helpers import numbers
from torch import Tensor, nn
from torch.nn import functional as F


class Stateful(nn.Module):
    """A state that a program reads and changes."""

    def __init__(self, program: Any) -> None:
        super().__init__()
        self.program = program
        self.register_buffer("buffer", numbers(3, seed=1))
        self.register_buffer("table", numbers(2, 3, seed=2))
        self.slots = [*numbers(3, 3, seed=11)]
        self.named: dict[str, Any] = {"mean": numbers(3, seed=3)}
        self.listed = [numbers(3, seed=4)]
        self.grid = [[numbers(3, seed=5 + 2 * i + j) for j in range(2)] for i in range(2)]
        self.holder = SimpleNamespace(h=numbers(3, seed=9))
        self.flags: dict[str, Any] = {}
        self.bounds = [torch.tensor(i) for i in range(9)]
        self.pair: Any = None
        self.kept: Any = ([numbers(3, seed=10)], {"n": 1})

    def forward(self, x: Tensor) -> Tensor:
        return self.program(self, x)

    def state(self) -> Any:
        held = self.named, self.listed, self.grid, self.holder.h, self.pair, self.kept, self.slots
        return self.buffer, self.table, *held


def add_in_place(m: Any, x: Tensor) -> Tensor:
    m.buffer.add_(x.detach())
    return x.sin() * (m.buffer + 1)


def add_to_attribute(m: Any, x: Tensor) -> Tensor:
    m.buffer += 1
    return x.sin() * (m.buffer + 1)


def use_what_is_changed(m: Any, x: Tensor) -> Tensor:
    return x.sin() * (m.buffer.mul_(2) + 1)


def change_a_view(m: Any, x: Tensor) -> Tensor:
    m.buffer[:1].mul_(3)
    m.buffer[1] = x.detach().mean()
    return x.sin() * (m.buffer + 1)


def change_a_slot(m: Any, x: Tensor) -> Tensor:
    """The slots of a cache are views of one tensor. One is changed, one is read before that, and one after."""
    y = x.sin() + m.slots[0]
    m.slots[1].mul_(0.5).add_(x.detach())
    return y * m.slots[1].clone() + m.slots[2]


def change_data(m: Any, x: Tensor) -> Tensor:
    m.buffer.data.mul_(2)
    return x.sin() * (m.buffer + 1)


def write_by_out(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        m.buffer = F.normalize(m.buffer + x, dim=0, out=m.buffer)  # as spectral_norm
    return x.sin() * m.buffer.clone()


def replace_buffer(m: Any, x: Tensor) -> Tensor:
    m.buffer = m.buffer + x.detach().mean()
    return x.sin() * m.buffer


def replace_item(m: Any, x: Tensor) -> Tensor:
    m.named["mean"] = m.named["mean"] + x.detach().mean()
    return x.sin() * m.named["mean"]


def change_item(m: Any, x: Tensor) -> Tensor:
    m.named["mean"] += 1
    return x.sin() * (m.named["mean"] + 1)


def bounds_of_a_slice(m: Any, x: Tensor) -> Tensor:
    begin, end, *_ = m.bounds
    m.bounds = m.bounds[1:]
    return x.sin() * torch.arange(1.0, 9.0, dtype=x.dtype)[begin:end]


def append(m: Any, x: Tensor) -> Tensor:
    m.listed.append(m.listed[-1] * 2)
    return x.sin() * m.listed[-1]


def a_new_key(m: Any, x: Tensor) -> Tensor:
    m.named[str(len(m.named))] = list(m.named.values())[-1] * 2
    return x.sin() * list(m.named.values())[-1]


def a_pair_in_a_dict(m: Any, x: Tensor) -> Tensor:
    h, c = m.named.get("hc", (m.buffer, m.buffer + 1))
    c = c * 0.5 + x.detach()
    m.named["hc"] = (h + c, c)
    return x.sin() * h + c


def a_pair_in_an_attribute(m: Any, x: Tensor) -> Tensor:
    h, c = m.pair or (m.buffer, m.buffer * 2)
    m.pair = (h * 0.5, c + x.detach())
    return x.sin() * h * c


def a_generator_of_a_pair(m: Any, x: Tensor) -> Tensor:
    m.pair = tuple(s * 0.5 for s in (m.pair or (m.buffer, m.buffer + 1)))
    return x.sin() * m.pair[0] + m.pair[1]


def an_object_made_at_first(m: Any, x: Tensor) -> Tensor:
    if not hasattr(m, "made"):
        m.made = SimpleNamespace(h=m.buffer.clone())
    y = x.sin() * m.made.h
    m.made.h = m.made.h * 0.5 + x.detach()
    return y


def an_object_changed_in_place(m: Any, x: Tensor) -> Tensor:
    m.holder.h.mul_(0.5)
    return x.sin() * (m.holder.h + 1)


def an_object_replaced(m: Any, x: Tensor) -> Tensor:
    y = x.sin() * m.holder.h
    m.holder = SimpleNamespace(h=m.holder.h * 0.5)
    return y


def an_item_of_a_list(m: Any, x: Tensor) -> Tensor:
    y = x.sin() * m.listed[0]
    m.listed[0] = m.listed[0] * 0.5 + 1
    return y


def pop_and_insert(m: Any, x: Tensor) -> Tensor:
    state = m.listed.pop()
    m.listed.insert(0, state * 0.5)
    m.listed.insert(0, state + 1)
    return x.sin() * state


def a_dict_in_a_dict(m: Any, x: Tensor) -> Tensor:
    layer = m.named.setdefault("layer", {})
    h = layer.get("h", m.buffer)
    layer["h"] = h * 0.5 + 1
    return x.sin() * h


def a_list_of_lists(m: Any, x: Tensor) -> Tensor:
    m.grid[0][1] = m.grid[0][1] * 0.5 + 1
    return x.sin() * m.grid[0][1] * m.grid[1][0]


def copy_into_an_item(m: Any, x: Tensor) -> Tensor:
    m.named["mean"].copy_(m.named["mean"] * 0.5 + x.detach())
    return x.sin() * m.named["mean"].clone()


def average_of_results(m: Any, x: Tensor) -> Tensor:
    y = x.sin()
    m.named["mean"] = 0.9 * m.named["mean"] + 0.1 * y.detach()
    return y * m.named["mean"]


def a_flag_in_a_dict(m: Any, x: Tensor) -> Tensor:
    if not m.flags.get("ready"):
        m.named["first"] = x.detach() * 2
        m.flags["ready"] = True
    return x.sin() * m.named["first"]


def exchange(m: Any, x: Tensor) -> Tensor:
    m.buffer, m.named["mean"] = m.named["mean"], m.buffer
    return x.sin() * m.buffer


def grow_a_buffer(m: Any, x: Tensor) -> Tensor:
    m.buffer = torch.cat([m.buffer, x.detach()[:1]])
    return x.sin() * m.buffer.sum()


def assign_to_a_slice(m: Any, x: Tensor) -> Tensor:
    m.buffer[:2] = x.detach()[:2]
    return x.sin() * (m.buffer + 1)


def add_to_a_row(m: Any, x: Tensor) -> Tensor:
    row = m.table[0]
    row += x.detach()
    return x.sin() * m.table.sum(0)


def change_chunks(m: Any, x: Tensor) -> Tensor:
    a, b = m.table.chunk(2)
    a.mul_(2)
    b.add_(a)
    return x.sin() * m.table.mean(0)


def foreach(m: Any, x: Tensor) -> Tensor:
    torch._foreach_add_([m.buffer, m.table[1]], 1.0)
    return x.sin() * (m.buffer + m.table[1])


def change_what_is_detached(m: Any, x: Tensor) -> Tensor:
    m.buffer.detach().add_(1)
    return x.sin() * m.buffer.clone()


def assign_data(m: Any, x: Tensor) -> Tensor:
    m.buffer.data = m.buffer * 0.5
    return x.sin() * m.buffer.clone()


def change_what_is_detached_of_a_row(m: Any, x: Tensor) -> Tensor:
    m.table[0].detach().add_(0.5)
    m.table[1].data.mul_(0.5)
    return x.sin() * m.table.sum(0)


def change_an_item_and_read_another(m: Any, x: Tensor) -> Tensor:
    y = x.sin() * m.buffer.clone()
    m.grid[0][1] += 1
    return y


def put_into_the_place_of_what_nobody_reads(m: Any, x: Tensor) -> Tensor:
    m.grid[0][1] = x.detach() * 2
    m.named["mean"] = m.grid[0][1] + 1 if "mean" in m.named else m.buffer
    return x.sin() * m.named["mean"]


def there_in_every_second_call(m: Any, x: Tensor) -> Tensor:
    y = x.sin() * m.buffer
    if m.pair is None:
        y = (y * 2).cos()
    m.pair = None if m.pair is not None else x.detach() * 2
    m.buffer = m.buffer * 0.5
    return y


def there_in_a_dict_in_every_second_call(m: Any, x: Tensor) -> Tensor:
    y = (x.sin() * m.buffer).cos() if "seen" in m.flags else x.sin() * m.buffer
    if m.flags.pop("seen", None) is None:
        m.flags["seen"] = x.detach() * 2
    return y.sin()


def the_first_of_a_dict_becomes_the_last(m: Any, x: Tensor) -> Tensor:
    m.named.setdefault("other", m.buffer)
    first = next(iter(m.named))
    m.named[first] = m.named.pop(first) * 0.5 + 1
    return x.sin() * m.named[first]


def result_of_the_last_call(m: Any, x: Tensor) -> Tensor:
    y = x.sin() if m.pair is None else x.sin() * m.pair
    m.pair = y
    return y


IN_PLACE = [
    add_in_place,
    add_to_attribute,
    use_what_is_changed,
    change_a_view,
    change_a_slot,
    change_data,
    write_by_out,
    change_item,
    an_object_changed_in_place,
    copy_into_an_item,
    assign_to_a_slice,
    add_to_a_row,
    change_chunks,
    foreach,
    change_what_is_detached,
    assign_data,
    change_what_is_detached_of_a_row,
    change_an_item_and_read_another,
]
"""They write to tensors, and replace none."""
REPLACED = [
    replace_buffer,
    replace_item,
    bounds_of_a_slice,
    append,
    a_new_key,
    a_pair_in_a_dict,
    a_pair_in_an_attribute,
    a_generator_of_a_pair,
    an_object_made_at_first,
    an_object_replaced,
    an_item_of_a_list,
    pop_and_insert,
    a_dict_in_a_dict,
    a_list_of_lists,
    average_of_results,
    a_flag_in_a_dict,
    exchange,
    grow_a_buffer,
    put_into_the_place_of_what_nobody_reads,
    there_in_every_second_call,
    there_in_a_dict_in_every_second_call,
    the_first_of_a_dict_becomes_the_last,
    result_of_the_last_call,
]
"""They put other tensors in the places where they have found some."""
