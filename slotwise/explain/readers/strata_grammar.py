"""Strata's log lines as regular expressions, and the words its lines are made of.

The formats are those of the public sources of the engine and its forks (0.1.30 and later).
Nothing here keeps state. A pattern's groups are numbers or words of a closed set.
"""

from __future__ import annotations

import re

INT = r"(-?\d{1,15})"
NUM = r"(-?\d{1,12}(?:\.\d{1,9})?)"

# --- STRATA_TRACE=1, after "strata trace: "
REQUEST = re.compile(rf"request {INT} {INT}\s*$")
PROMPT_START = re.compile(rf"prompt start {INT} {INT}\s*$")
LENT = re.compile(rf"lent {INT} slots for {INT} tokens in {NUM} ms\s*$")
CHUNK = re.compile(rf"prompt chunk {INT} of {INT}\s*$")
READ = re.compile(rf"read {INT} tokens \(([a-z][a-z -]{{0,20}})\) in {NUM} ms\s*$")
REFILL_START = re.compile(rf"refill start {INT} {INT}\s*$")
REFILLED = re.compile(rf"refilled {INT} slots on {INT} stage\(s\) in {NUM} ms\s*$")
PROMPT_DONE = re.compile(r"prompt done \(slots refilled\)")
WINDOW = re.compile(rf"window {INT} {INT}\s*$")
INTERLEAVE = re.compile(rf"prompt chunk to {INT}, then the slots decoded {NUM} ms\s*$")
FREE_AFTER = re.compile(rf"{INT} MiB free after ")
TRACE_KNOWN = re.compile(
    r"positions built |device idle |CURSOR |SPEC |GRAMMAR |streamed layer-major |.* drained "
)
TRACE_LINES: dict[str, tuple[tuple[str, re.Pattern[str]], ...]] = {
    "requ": (("request", REQUEST),),
    "lent": (("lent", LENT),),
    "read": (("read", READ),),
    "refi": (("refilled", REFILLED), ("refill_start", REFILL_START)),
    "wind": (("window", WINDOW),),
    "prom": (
        ("nothing", CHUNK),
        ("nothing", PROMPT_START),
        ("prompt_done", PROMPT_DONE),
        ("interleave", INTERLEAVE),
    ),
}
"""Trace lines by their first four characters."""

# --- STRATA_PREFILL_TIMING=1, after "strata prefill timing: "
RUN = re.compile(
    rf"(\[chunk\] )?{INT} tokens, GPU timeline {NUM} ms, wall {NUM} ms, "
    rf"host staging {NUM} ms:(.*)$"
)
HOST = re.compile(
    rf"host: chunk setup \([^)]*\) {NUM} ms, waiting for each chunk {NUM} ms, "
    rf"after each chunk \([^)]*\) {NUM} ms(?:, PLE {NUM} ms)?"
)
FRENCH_PROMPT = re.compile(rf"prompt, GPU {NUM} ms:(.*)$")
FRENCH_CHUNK = re.compile(rf"chunk {INT}, positions {INT}-{INT}, GPU {NUM} ms:(.*)$")
SETUP = re.compile(rf"setup ([A-Za-z (),+-]{{1,40}}?) {NUM} ms$")
PEER_EXPERTS = re.compile(rf"peer-streamed experts {INT} ")
PHASE = re.compile(rf"\s*,?\s*([A-Za-z][^()%]{{0,60}}?) {NUM}(?: ms)? \({NUM}%\)")
PEER_PHASE = re.compile(rf"\s*([A-Za-z][A-Za-z0-9 +/_-]{{0,40}}?) {NUM}(?=\s|;|$)")

TRANSFER_KEYS = (
    "expert_copies", "expert_bytes", "dma_active_ms", "copy_span_ms", "host_copy_worker_ms",
    "ple_preload_ms",
)  # fmt: skip
"""Of the Xe fork's transfer line: copies overlap the GPU, so these are facts, not phases."""

# --- STRATA_DECODE_TIMING=1, after "strata decode timing: "
DECODE = re.compile(
    rf"{INT} windows, avg T {NUM}, {NUM} tokens/window,[^=]*? {NUM} ms/window = verify {NUM} "
    rf"\(GPU-reach wait {NUM} \+ per-layer host {NUM}(?: \[[^\]]*\])? \+ stage {NUM}"
    rf"(?: \+ tail {NUM})?\) \+ commit/emit {NUM} \+ draft {NUM}"
)

# --- the summary block, after "strata serve: "
SUMMARY = re.compile(
    rf"prompt {INT} tokens = {INT} reused \+ {INT}(?: of {INT})? read in {NUM} ms "
    rf"\((-?[\d.]+|inf|-?nan) tok/s\), {INT} generated in {NUM} ms "
    rf"\((-?[\d.]+|inf|-?nan) tok/s\)(?:, drafts accepted {INT} of {INT})?"
    rf"(?:, {INT} checkpoints)?(.*)$"
)
HIT_RATE = re.compile(
    rf"decode expert cache hit rate: {NUM}% \({INT} hits / {INT} lookups\)"
    rf"(?:; {INT} more read by the GPU over PCIe)?"
)
PARKED = re.compile(rf"conversation cache: (?:parked|skipped) {INT} tokens in {NUM} ms")
RESTORED = re.compile(rf"conversation cache: restored {INT} tokens \([^)]*\) in {NUM} ms")
CACHE_OTHER = re.compile(r"conversation cache: (?:skip parking|discard|dropped)")
RESIDENT_RAM = re.compile(rf"resident RAM: .* {INT} blob reads from the file")
TIERS = re.compile(
    rf"expert tiers: GPU {INT} hits this request; since the start RAM {INT} blobs, "
    rf"files {INT} blobs {NUM} MB read"
)
SUFFIX_DRAFTS = re.compile(rf"suffix drafts: {INT} windows, {INT} of {INT} drafts accepted")
NO_PROGRESS = re.compile(r"no progress for \d+ s during a request")
CHUNK_AUTO = re.compile(rf"prompt chunk auto: {INT} tokens")
BORROWS = re.compile(rf"the prompt path borrows {INT}(?: CUDA\d+)? cache slots \({NUM} GiB\)")
OWN_BUFFERS = "the prompt path allocates its own buffers"

# --- batch mode, after "strata batch: "
BATCH_PARTS = re.compile(
    rf"the prompt was read in {INT} parts, the slots decoding {NUM} ms between them"
)
BATCH_TAKES = re.compile(rf"slot {INT} takes {INT} tokens \(copied in {NUM} ms\)")
BATCH_BACK = re.compile(rf"slot {INT} gave back {INT} tokens of this conversation .* in {NUM} ms")
BATCH_YIELD = re.compile(
    rf"the prompt read gives way at {INT} of {INT} tokens; .*\(copied in {NUM} ms\)"
)

# --- start-up, after "strata generate: "
ENGINE_UP = re.compile(
    r"session is up \(engine (\d{1,4}(?:\.\d{1,6}){1,4}(?:-(?:sycl|xe|vulkan|hip|rocm|cuda|cpu))?)"
)
CACHE_SLOTS = re.compile(rf"expert cache {INT} slots, {NUM} GiB of VRAM")
ONE_SHOT = re.compile(
    rf"prefill {INT} tokens in {INT} chunks, {NUM} ms \({NUM} tok/s\); "
    rf"experts streamed {INT} \({INT} by DMA, host {NUM} ms\), resident {INT}; PLE {NUM} ms"
)
ONE_SHOT_REFILL = re.compile(rf"{INT} lent slots refilled in {NUM} ms")
FIRST_LINES = re.compile(
    r"this CPU has|native pack: |\d+ MiB of weights loaded|loaded [\d.]+ GiB|expert cache auto: "
)
"""Lines an engine prints before it is up: seen after that, a new engine has started."""

# --- the server's own lines, after "[strata] "
STARTED = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d engine started:(.*)$")
SERVER_REQUEST = re.compile(
    rf"request prompt {INT} cached {INT} output {INT} prompt_read {NUM} ms total {NUM} ms"
)
SERVER_KNOWN = re.compile(r"reading the prompt: |done: |[a-z ]{3,30}: ")
OPTION = re.compile(
    r"--(batch|spec|spec-min-p|max-context|kv-resident|vram-reserve-mib|pcie-frac|short-read"
    r"|conversation-cache-mib|layer-split|pipeline-windows|expert-cache|prefill)[ =]"
    r"(?:auto:)?(\d{1,9}(?:\.\d{1,4})?)(?= |$)"
)

# --- the engine's stdout protocol
DONE = re.compile(
    rf"DONE {INT} {INT} {NUM} {NUM} ([a-z_]{{1,16}}) {INT} {INT} {INT}((?: [\d.-]+)*)"
)
PP = re.compile(rf"PP {INT} {INT} {NUM} ")
PROTOCOL = frozenset(
    [
        "INFO",
        "READY",
        "T",
        "YIELDED",
        "BT",
        "BDONE",
        "BADM",
        "VRAM",
        "SAVED",
        "RESTORED",
        "SERR",
        "SESSION",
        "SWAIT",
        "TUNED",
        "PFSTATE",
        "SUSPENDED",
        "RESUME",
        "REUSED",
        "PP",
        "DONE",
        "ERR",
        "FATAL",
        "GEN",
        "GENI",
        "BGEN",
        "BGENI",
        "STOP",
        "BSTOP",
        "BYIELD",
        "QUIT",
    ]
)

MEASURED_COMMENT = re.compile(r"# run=(\d{1,6}) label=\S{1,80} measured=(True|False)\s*$")

PREFIX = re.compile(r"[^\n]{0,120}?(?:\d\d:\d\d[^\n]{0,60}?|\| ?|\]: ?)(?=strata |\[strata\] )")
"""What a journal, a container or a script puts before each line."""
DOCKER_JSON = re.compile(r'\{"log":"((?:[^"\\]|\\.){0,16384}?)(?:\\r)?(?:\\n)?"[,}]')
ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")

HEADS = (
    "strata trace: ",
    "strata serve: ",
    "strata prefill ",
    "strata decode ",
    "strata generate: ",
    "strata batch: ",
    "strata verify: ",
    "strata mtp: ",
    "[strata] ",
)

IGNORED_HEADS = frozenset(
    [
        "strata verify",
        "strata mtp",
        "strata hc",
        "strata select",
        "strata",
        "strata serial cache policy",
        "strata serial cache barriers",
        "strata accepted usage",
        "strata-vision",
    ]
)
"""Known lines that hold nothing this reader reports."""

VOCABULARY = frozenset(
    [
        "strata",
        "trace",
        "serve",
        "prefill",
        "decode",
        "generate",
        "batch",
        "verify",
        "mtp",
        "hc",
        "select",
        "timing",
        "phases",
        "request",
        "prompt",
        "start",
        "lent",
        "slots",
        "for",
        "tokens",
        "in",
        "ms",
        "chunk",
        "of",
        "read",
        "windows",
        "batched",
        "refill",
        "refilled",
        "on",
        "stage",
        "s",
        "done",
        "window",
        "positions",
        "built",
        "device",
        "idle",
        "free",
        "after",
        "GPU",
        "timeline",
        "wall",
        "host",
        "staging",
        "setup",
        "waiting",
        "each",
        "the",
        "reused",
        "generated",
        "drafts",
        "accepted",
        "checkpoints",
        "cancelled",
        "expert",
        "cache",
        "hit",
        "rate",
        "hits",
        "lookups",
        "conversation",
        "parked",
        "restored",
        "skipped",
        "MiB",
        "GiB",
        "VRAM",
        "engine",
        "started",
        "session",
        "is",
        "up",
        "slot",
        "experts",
        "peer",
        "streamed",
        "transfer",
        "prompt",
        "PLE",
        "KV",
        "streaming",
        "tok",
        "DONE",
        "ERR",
        "PP",
        "READY",
        "INFO",
        "memory",
        "stall",
        "report",
        "resident",
        "RAM",
        "exchanged",
        "tier",
        "tiers",
        "copied",
    ]
)

CONTAINS = {
    "embed+steps": "embedding rows and step records; also GPU idle while the host prepares, and "
    "the callback after the previous chunk (draft layer, progress, checkpoint)",
    "wait copy": "the compute stream waiting for an expert's copy, not the copy's own time",
    "host grouping": "the GPU waiting for the host to sort the routing",
    "dequant": "the gather of the quantised path too, and host waits between experts",
    "gather": "gathering and quantising activation rows",
}
IDLE = "the stretch between two marks on the GPU: idle gaps count too"
