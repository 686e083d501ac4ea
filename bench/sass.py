"""Loops in compiled kernels: control flow, dominators and natural loops of SASS and amdgcn listings.

The two instruction sets differ in how a line is read and in the opcodes that count; everything between is shared. Nodes of
the flow graph are instructions, not basic blocks: a kernel has a few thousand, and one concept less is worth the milliseconds.
"""

import dataclasses
import re
from collections.abc import Iterable, Iterator

__all__ = ["Instruction", "count", "flops_per_warp", "main_loops", "natural_loops", "parse_amdgcn", "parse_sass"]


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction, without its predicate, and the indexes of those that may run after it."""

    text: str
    successors: tuple[int, ...]


# ---- reading listings

SASS_LINE = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+\s+)?(.*?)\s*;")
SASS_JUMP = re.compile(r"(BRA|BRX|JMP)\b.*?(?:0x([0-9a-f]+))?$")
SASS_PLAIN_JUMP = re.compile(r"(BRA|JMP)(\.\w+)* 0x[0-9a-f]+$")  # an operand before the target is a condition
SASS_END = re.compile(r"(EXIT|RET|KILL)\b")

AMDGCN_LABEL = re.compile(r"^(\.LBB\w+):")
AMDGCN_LINE = re.compile(r"^\s+([a-z]\w+\b[^;]*)")
AMDGCN_JUMP = re.compile(r"s_c?branch\w*\s+(\.LBB\w+)")
AMDGCN_END = re.compile(r"s_(endpgm|setpc_b64)\b")


def parse_sass(listing: str) -> list[Instruction]:
    """The instructions of one kernel as `cuobjdump -sass` prints it."""
    lines = [m.groups() for m in map(SASS_LINE.match, listing.splitlines()) if m]
    index = {int(address, 16): i for i, (address, _, _) in enumerate(lines)}
    program = []
    for i, (_, predicate, text) in enumerate(lines):
        jump = SASS_JUMP.match(text)
        target = index.get(int(jump[2], 16)) if jump and jump[2] else None
        goes_on = bool(predicate) or not (SASS_PLAIN_JUMP.match(text) or SASS_END.match(text))
        program.append(Instruction(text, successors(i, len(lines), target, goes_on)))
    return program


def parse_amdgcn(assembly: str) -> list[Instruction]:
    """The instructions of one kernel in the assembly that the AMD backend keeps as `asm["amdgcn"]`."""
    lines: list[str] = []
    index: dict[str, int] = {}
    for line in assembly.splitlines():
        if label := AMDGCN_LABEL.match(line):
            index[label[1]] = len(lines)
        elif instruction := AMDGCN_LINE.match(line):
            lines.append(instruction[1].strip())
    program = []
    for i, text in enumerate(lines):
        jump = AMDGCN_JUMP.match(text)
        goes_on = not (text.startswith("s_branch") or AMDGCN_END.match(text))
        program.append(Instruction(text, successors(i, len(lines), index.get(jump[1]) if jump else None, goes_on)))
    return program


def successors(i: int, length: int, target: int | None, goes_on: bool) -> tuple[int, ...]:
    after = (i + 1,) if goes_on and i + 1 < length else ()
    return after if target is None else (*after, target)


# ---- loops


def reverse_postorder(program: list[Instruction]) -> list[int]:
    """The reachable instructions, each before its successors but for those that jump back."""
    order: list[int] = []
    seen = {0}
    stack: list[tuple[int, Iterator[int]]] = [(0, iter(program[0].successors))]
    while stack:
        node, pending = stack[-1]
        unseen = next((s for s in pending if s not in seen), None)
        if unseen is None:
            order.append(node)
            stack.pop()
        else:
            seen.add(unseen)
            stack.append((unseen, iter(program[unseen].successors)))
    return order[::-1]


def immediate_dominators(program: list[Instruction], order: list[int]) -> dict[int, int]:
    """For each instruction of `order`, the last other one that every path to it runs (Cooper, Harvey, Kennedy 2001)."""
    rank = {node: i for i, node in enumerate(order)}
    before = predecessors(program, order)
    idom = {0: 0}

    def common(a: int, b: int) -> int:
        while a != b:
            if rank[a] > rank[b]:
                a = idom[a]
            else:
                b = idom[b]
        return a

    changed = True
    while changed:
        changed = False
        for node in order[1:]:
            known = [p for p in before[node] if p in idom]
            new = known[0]
            for p in known[1:]:
                new = common(p, new)
            changed |= idom.get(node) != new
            idom[node] = new
    return idom


def predecessors(program: list[Instruction], nodes: Iterable[int]) -> dict[int, list[int]]:
    before: dict[int, list[int]] = {node: [] for node in nodes}
    for node in before:
        for s in program[node].successors:
            before[s].append(node)
    return before


def natural_loops(program: list[Instruction]) -> list[frozenset[int]]:
    """The loops of a program as sets of instruction indexes, in program order; loops with one header are one loop.

    A back edge is an edge to a dominator. Searching for backward branches instead would report the slow paths of barriers,
    which jump back into straight code.
    """
    order = reverse_postorder(program)
    idom = immediate_dominators(program, order)
    before = predecessors(program, order)
    rank = {node: i for i, node in enumerate(order)}

    def dominates(a: int, b: int) -> bool:
        while rank[b] > rank[a]:
            b = idom[b]
        return a == b

    bodies: dict[int, set[int]] = {}
    for node in order:
        for header in program[node].successors:
            if dominates(header, node):
                body = bodies.setdefault(header, {header})
                work = [node]
                while work:
                    inside = work.pop()
                    if inside not in body:
                        body.add(inside)
                        work.extend(before[inside])
    return [frozenset(bodies[header]) for header in sorted(bodies)]


# ---- what instructions do

MATRIX = re.compile(r"HGMMA|HMMA|UTC\w*MMA|v_mfma")
EXP2 = re.compile(r"MUFU\.EX2|v_exp_f32")
SPILL = re.compile(r"(STL|LDL)\b|scratch_(load|store)")
FMA = re.compile(r"FFMA")
COPY = re.compile(r"UTMALDG")  # of a tile, by its descriptor
REGISTER_MOVE = re.compile(r"USETMAXREG")

HGMMA_SHAPE = re.compile(r"HGMMA\.(\d+)x(\d+)x(\d+)")
HMMA_SHAPE = re.compile(r"HMMA\.16(8)(4|8|16)\b")
MFMA_SHAPE = re.compile(r"v_mfma_f32_(\d+)x(\d+)x(\d+)_")
WARPS_PER_HGMMA = 4


def count(pattern: re.Pattern[str], loop: Iterable[Instruction]) -> int:
    return sum(1 for instruction in loop if pattern.match(instruction.text))


def flops_per_warp(instruction: Instruction) -> float:
    """Floating-point operations that one warp does in a matrix instruction or an fp32 FMA; 0 for any other.

    The shape of a Blackwell `UTC*MMA` is in a descriptor, not in its text: it counts as 0 here.
    """
    text = instruction.text
    if shape := HGMMA_SHAPE.match(text):
        return 2 * int(shape[1]) * int(shape[2]) * int(shape[3]) / WARPS_PER_HGMMA
    if shape := HMMA_SHAPE.match(text):
        return 2 * 16 * int(shape[1]) * int(shape[2])
    if shape := MFMA_SHAPE.match(text):
        return 2 * int(shape[1]) * int(shape[2]) * int(shape[3])
    if FMA.match(text):
        lanes = 64 if text.startswith("FFMA2") else 32
        return 2 * lanes
    return 0


def main_loops(program: list[Instruction]) -> list[list[Instruction]]:
    """The innermost loops with arithmetic in them: of a kernel with matrix instructions those that hold any, else those with FMAs."""
    kind = MATRIX if count(MATRIX, program) else FMA
    loops = [loop for loop in natural_loops(program) if count(kind, (program[i] for i in loop))]
    innermost = [loop for loop in loops if not any(other < loop for other in loops)]
    return [[program[i] for i in sorted(loop)] for loop in innermost]
