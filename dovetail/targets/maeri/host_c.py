"""The host program that feeds an order to the engine, in C: phases, the tree's words, and the items each begins."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from dovetail.targets.maeri.phases import phases
from dovetail.targets.maeri.programming import tree_words
from dovetail.targets.maeri.schedule import Schedule

HEADER = """\
/* Feeds an order of a network to a MAERI. Written by Dovetail. */
#ifndef MAERI_ORDER_H
#define MAERI_ORDER_H

#include <stdint.h>

/* Some sums of one output channel, or of as many as the item's tile has filters. */
typedef struct {
    uint32_t channel;  /* the (first) output channel */
    uint32_t first;    /* first position of the result, rows first, in tiles */
    uint32_t count;    /* so many positions from there */
} maeri_segment_t;

/* Equal virtual neurons side by side, from their first weight to their last product. */
typedef struct {
    uint32_t start;          /* cycle of the first weight */
    uint16_t layer;          /* into maeri_layer_names */
    uint16_t multiplier;     /* the first of them */
    uint16_t size;           /* multipliers of one virtual neuron */
    uint16_t neurons;        /* how many of them */
    uint32_t product;        /* first product of each sum, counted by channel, row, column of the kernel */
    uint32_t products;       /* how many of them */
    uint32_t segment;        /* into maeri_segments */
    uint32_t segments;       /* how many of them */
} maeri_item_t;

/* A span of time with one configuration of the reduction tree. */
typedef struct {
    uint32_t start;          /* first cycle */
    uint32_t words;          /* into maeri_words, MAERI_TREE_WORDS of them */
    uint32_t item;           /* first item that begins with it */
    uint32_t items;          /* how many */
} maeri_phase_t;

#define MAERI_LAYERS %(layers)du
#define MAERI_ITEMS %(items)du
#define MAERI_PHASES %(phases)du
#define MAERI_TREE_WORDS %(words)du
#define MAERI_MAKESPAN %(makespan)du

extern const char *const maeri_layer_names[MAERI_LAYERS];
extern const maeri_segment_t maeri_segments[];
extern const maeri_item_t maeri_items[MAERI_ITEMS];
extern const maeri_phase_t maeri_phases[MAERI_PHASES];
extern const uint32_t maeri_words[];

/* What the platform implements. */
void maeri_wait_until(uint32_t cycle);               /* of the engine, counted from maeri_run */
void maeri_configure(const uint32_t *words);         /* write the reduction tree's configuration */
void maeri_start(const maeri_item_t *item);          /* send an item's weights, then its inputs */

/* Feed the whole order; returns when its last result exists. */
void maeri_run(void);

#endif
"""
_RUN = """\
void maeri_run(void)
{
    for (uint32_t number = 0; number < MAERI_PHASES; ++number) {
        const maeri_phase_t *phase = &maeri_phases[number];
        maeri_wait_until(phase->start);
        maeri_configure(&maeri_words[phase->words]);
        for (uint32_t item = 0; item < phase->items; ++item) {
            maeri_start(&maeri_items[phase->item + item]);
        }
    }
    maeri_wait_until(MAERI_MAKESPAN);
}
"""


def host_files(schedule: Schedule) -> dict[str, str]:
    """The header and the source, by file name."""
    config, works = schedule.config, schedule.network.works
    spans = phases(schedule)
    trees = {phase.configuration: tree_words(config, phase.tree) for phase in spans}
    size = len(trees[0])
    header = HEADER % {
        "layers": len(works), "items": len(schedule.items), "phases": len(spans),
        "words": size, "makespan": schedule.makespan,
    }  # fmt: skip
    starts = [item.start for item in schedule.items]
    begun = [(starts.index(phase.start) if phase.start in starts else 0, starts.count(phase.start)) for phase in spans]
    lines = ['#include "maeri_order.h"', ""]
    names = (f'"{_plain(work.name)}"' for work in works)
    lines += _array("const char *const maeri_layer_names[MAERI_LAYERS]", names, 1)
    segments = [part for item in schedule.items for part in item.segments]
    lines += _array("const maeri_segment_t maeri_segments[]", (_row(p.channel, p.first, p.count) for p in segments), 4)
    lines += _array("const maeri_item_t maeri_items[MAERI_ITEMS]", _items(schedule), 2)
    rows = (_row(phase.start, phase.configuration * size, *run) for phase, run in zip(spans, begun, strict=True))
    lines += _array("const maeri_phase_t maeri_phases[MAERI_PHASES]", rows, 4)
    words = (f"0x{word:08x}u" for number in sorted(trees) for word in trees[number])
    lines += _array("const uint32_t maeri_words[]", words, 8)
    return {"maeri_order.h": header, "maeri_order.c": "\n".join(lines) + "\n" + _RUN}


def _items(schedule: Schedule) -> Iterable[str]:
    at = 0
    for item in schedule.items:
        size = item.place.size // item.tile.neurons if item.tile.neurons > 1 else item.tile.size
        yield _row(item.start, item.work, item.place.start, size, item.tile.neurons, item.taps[0],
                   item.taps[1] - item.taps[0], at, len(item.segments))  # fmt: skip
        at += len(item.segments)


def _row(*numbers: int) -> str:
    return "{" + ", ".join(f"{number}u" for number in numbers) + "}"


def _array(declaration: str, elements: Iterable[str], each: int) -> list[str]:
    """A constant array, so many elements on a line."""
    found: Sequence[str] = list(elements)
    lines = [f"    {', '.join(found[at : at + each])}," for at in range(0, len(found), each)]
    return [f"{declaration} = {{", *lines, "};", ""]


def _plain(name: str) -> str:
    """A name as it may stand in a C string."""
    kept = (letter.isascii() and letter.isprintable() and letter not in '"\\?' for letter in name)
    return "".join(letter if keep else "_" for letter, keep in zip(name, kept, strict=True))
