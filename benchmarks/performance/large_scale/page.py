"""The page of `benchmarks.performance.large_scale`: what it costs, what breaks first, how workers share it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.common import table
from benchmarks.performance.large_scale import workload
from benchmarks.performance.large_scale.federation_costs import IMAGES_EACH
from benchmarks.performance.large_scale.workload import CLIENTS, GPU_BYTES, PARAMETERS, UPDATES, USES, GpuSeconds
from eval.run.claims import MOST_DEATHS
from eval.run.runner import SHARE_OF_TIME
from fl.simulation.uploads import MAX_SEPARATE_BYTES

Known = Mapping[str, Any]
NETWORK_BYTES = 4 * PARAMETERS
KEEPS_A_NETWORK = 0.5
"""Share of the network from which on a client is said to keep one."""
MIB = 2**20


def document(known: Known) -> list[str]:
    """Return the page of what was measured, counted and simulated."""
    return [
        f"# {CLIENTS:,} clients, {UPDATES:,} attacked updates, networks of 1e8 parameters",
        "",
        "What it costs on 8 and 64 GPUs, what breaks first, and what is streamed. Seconds and bytes of one client, "
        "cell or parameter were measured on the machine below. Seconds of a GPU are operations and bytes that were "
        f"counted here, at the rates of one {known['gpu']['device']}. No network of this size was run on a GPU, so "
        "these are estimates.",
        "",
        *_summary(known),
        "",
        "## What it costs",
        "",
        *_workload_words(),
        "",
        *table(COST_HEAD, _cost_rows(known)),
        "",
        *_assumptions(known),
        "",
        "## What breaks first",
        "",
        "What stops a run comes first, then what slows it. A network in float32 takes 400 MB. Limits are those of a "
        "GPU of 80 GB, on which views, clients' states and uploads lie, too.",
        "",
        *table(LIMIT_HEAD, _limit_rows(known)),
        "",
        *_states(known),
        "",
        "## What is streamed",
        "",
        *_streamed(known),
        "",
        "## Workers that share it",
        "",
        *_simulation_words(known),
        "",
        *table(SIMULATION_HEAD, _simulation_rows(known)),
        "",
        *_bounds(),
        "",
        *_checked(known),
        "",
        "`python -m benchmarks.performance.large_scale` makes this page again (15 CPU minutes), `--only` measures "
        "parts of it.",
    ]


# ---- words for numbers -----------------------------------------------------------------------------------------------
def time_words(seconds: float) -> str:
    """Return seconds in the unit that people would say."""
    for unit, size in (("days", 86_400.0), ("h", 3_600.0), ("min", 60.0), ("s", 1.0), ("ms", 1e-3)):
        if seconds >= 2 * size or (unit in ("s", "ms") and seconds >= size):
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"


def byte_words(count: float) -> str:
    """Return bytes in the unit that people would say."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f} B"


# ---- costs -----------------------------------------------------------------------------------------------------------
COST_HEAD = [
    "what",
    "one, here",
    "how many",
    "one, H100",
    "all, H100",
    "one, H100, transformer",
    "all, H100, transformer",
]


def gpus(known: Known) -> tuple[GpuSeconds, GpuSeconds]:
    """Return a GPU's seconds for a perceptron and for a transformer."""
    perceptron, transformer = (workload.gpu_seconds(known, uses) for uses in USES.values())
    return perceptron, transformer


def largest(known: Known) -> Mapping[str, float]:
    """Return what was measured of the largest network."""
    found: Mapping[str, float] = max(known["networks"], key=lambda one: one["parameters"])
    return found


def method_row(known: Known, name: str) -> Mapping[str, Any]:
    """Return what was measured of many clients of a method."""
    found: Mapping[str, Any] = next(row for row in known["clients"] if row["method"] == name)
    return found


def _cost_rows(known: Known) -> list[list[str]]:
    big, tiny, folder, disk = largest(known), method_row(known, "fedavg"), known["folder"], known["disk"]
    pair, each_round = gpus(known), workload.ROUNDS * CLIENTS // 100
    cells = folder["cells"]

    def on_gpu(what: str, here: float, count: int) -> list[str]:
        one = [getattr(gpu, what) for gpu in pair]
        parts = [words for value in one for words in (time_words(value), time_words(value * count))]
        return [time_words(here), f"{count:,}", *parts]

    def beside(one: float, count: float) -> list[str]:
        return [time_words(one), f"{count:,.0f}", "", time_words(one * count), "", ""]

    trainings = [[time_words(gpu.training(share)) for gpu in pair] for share in (0.01, 1.0)]
    return [
        ["a client's step", *on_gpu("step", big["seconds_step"], each_round * workload.STEPS)],
        [
            "a client's round beside its steps",
            *on_gpu("client", max(big["seconds_client"] - big["seconds_step"], 0.0), each_round),
        ],
        [
            "a client's accuracy, of the tiny network",
            *on_gpu("scoring", tiny["seconds_scored"] / CLIENTS, workload.SCORINGS * CLIENTS),
        ],
        ["**a training**, 1 % of the clients in a round", "", "1", "", trainings[0][0], "", trainings[0][1]],
        ["**a training**, all clients in every round", "", "1", "", trainings[1][0], "", trainings[1][1]],
        [
            "**a search**: an iteration for one update",
            *on_gpu("iteration", big["seconds_iteration"], UPDATES * workload.ITERATIONS),
        ],
        [
            "a checkpoint of the network (FedAvg), written and read",
            *beside(big["seconds_write"] + big["seconds_read"], 1),
        ],
        [
            "an update's file, written and read",
            *beside(big["seconds_capture_write"] + big["seconds_capture_read"], UPDATES),
        ],
        ["claiming a cell and giving it up", *beside(disk["seconds_claim"], cells)],
        ["finishing a cell", *beside(disk["seconds_finish"], cells)],
        ["a cell of the plan, in each worker", *beside(folder["seconds_prepare"] / cells, cells)],
        ["a cell of `--plan`", *beside(folder["seconds_plan"] / cells, cells)],
        [
            "a cell of rows, pictures, table and report",
            *beside((folder["seconds_assemble"] + folder["seconds_report"]) / cells, cells),
        ],
    ]


def _workload_words() -> list[str]:
    return [
        f"- A training of {workload.ROUNDS} rounds, in each of which 1 % of the clients take part.",
        f"- A client takes {workload.STEPS} steps of {workload.BATCH} images in a round. All are scored before and "
        "after.",
        f"- Then `ig` on {UPDATES:,} updates of one image each, with its default of {workload.ITERATIONS:,} "
        "iterations.",
        "",
        "Seconds here are of one thread; of files they are by the clock.",
    ]


def _assumptions(known: Known) -> list[str]:
    counts = known["counts"]
    return [
        f"- **Counted**: for each parameter of a perceptron a step takes {counts['step']['operations']:.0f} "
        f"operations and {counts['step']['bytes']:.0f} bytes. An iteration of the search takes "
        f"{counts['iteration']['operations']:.0f} and {counts['iteration']['bytes']:.0f}.",
        f"- **Measured**, in [gpu.md](gpu.md): an H100 copies {known['gpu']['copy_bytes_per_second'] / 1e12:.2f} "
        "TB/s. What is bound by bytes takes as long as they do.",
        f"- **Published**: {workload.PEAK / 1e12:.0f} TFLOP/s in float32 (NVIDIA's data sheet of the H100 SXM). We "
        "compute in nothing less.",
        f"- **Assumed**: {workload.SHARE_OF_PEAK:.0%} of that is reached, as the training of "
        "[Llama 3](https://arxiv.org/abs/2407.21783) reports in bfloat16 (Table 4).",
        f"- **Assumed**: a transformer uses each weight {USES['transformer']} times an image (ViT-B/16), and its "
        "activations move no bytes.",
        "- **Assumed**: what a client takes on the host, whatever its network, is what the tiny network takes here.",
    ]


# ---- limits ----------------------------------------------------------------------------------------------------------
LIMIT_HEAD = ["what", "measured", "at this size", "breaks at", "what to do"]


def _limit_rows(known: Known) -> list[list[str]]:
    return [*_memory_rows(known), *_disk_and_search_rows(known), *_work_rows(known), *_host_rows(known)]


def _memory_rows(known: Known) -> list[list[str]]:
    view = known["views"]["networks"] * NETWORK_BYTES
    fedavg, ditto = method_row(known, "fedavg"), method_row(known, "ditto")
    hyper = known["hypernetwork"]["networks"]
    (kept,) = (row["client"] for row in known["states"] if row["method"] == "ditto")
    return [
        [
            "all views of an attack cell are held at once",
            f"{known['views']['networks']:.1f} networks each: the update, and the network without what is private",
            byte_words(UPDATES * view),
            f"{GPU_BYTES // view:.0f} updates",
            "`--set 'observe.seed=[0, 1, ...]'` spreads an attack over cells",
        ],
        [
            "a client keeps a network",
            f"{kept:.1f} networks of `ditto`: {ditto['mib_after'] - fedavg['mib_after']:.0f} MiB more than `fedavg`, "
            f"when {CLIENTS:,} have trained the tiny network",
            byte_words(CLIENTS * NETWORK_BYTES),
            f"{GPU_BYTES // NETWORK_BYTES:.0f} clients",
            "a method whose clients keep little (below)",
        ],
        [
            "uploads are kept apart where the server takes more than their mean",
            f"{known['aggregation'][1]['mib_held']:.0f} of {known['aggregation'][1]['mib_sent']:.0f} MiB held in a "
            "round of `scaffold`",
            f"{byte_words(CLIENTS // 100 * NETWORK_BYTES)} at 1 % of the clients",
            f"{GPU_BYTES // NETWORK_BYTES:.0f} clients in a round",
            "fewer clients in a round",
        ],
        [
            "HyperFL's hypernetwork",
            f"{hyper:.0f} times the network, on `hyperfl-grey`",
            byte_words(hyper * NETWORK_BYTES),
            f"{GPU_BYTES / hyper / 4 / 1e6:.0f} million parameters",
            "`hyperfl-lpm`, which generates adapters alone",
        ],
    ]


def _disk_and_search_rows(known: Known) -> list[list[str]]:
    big, held = largest(known), CLIENTS * NETWORK_BYTES
    rate = big["bytes_checkpoint"] / big["seconds_write"]
    return [
        [
            "a checkpoint of all clients is one file, written whole",
            f"{byte_words(rate)}/s here",
            f"{byte_words(held)} in {time_words(held / rate)}, every minute",
            f"{rate * 60 / NETWORK_BYTES:.0f} clients that keep a network",
            "`--checkpoint-every` longer than a file takes",
        ],
        [
            "memory of a search",
            f"{byte_words(big['mib_attack'] * MIB)} in all for one update, here",
            "updates are taken together as far as the attack's `memory_limit_gib` allows, by its own estimate",
            "one update that needs more than that, by default 8 GiB: the attack refuses",
            "a larger `memory_limit_gib`",
        ],
    ]


def _work_rows(known: Known) -> list[list[str]]:
    transformer = gpus(known)[1]
    slow = transformer.training(1.0)
    return [
        [
            "a training stays on one GPU",
            "clients of a round are not spread over workers",
            f"{time_words(slow)} with all clients in every round, transformer",
            "one training",
            "more trainings (methods, seeds) than GPUs",
        ],
        [
            "a state is kept between rounds alone",
            "what a dead worker did of a round is lost",
            f"{time_words(slow / workload.ROUNDS)} a round of all clients, transformer",
            f"{MOST_DEATHS} deaths within one round: the cell is given up",
            "fewer clients in a round; the same command tries again",
        ],
        [
            "an attack cell stays on one GPU",
            "portions are shared on CPUs alone",
            time_words(transformer.search(UPDATES)) + ", transformer",
            "one attack",
            "spread it, as above",
        ],
    ]


def _host_rows(known: Known) -> list[list[str]]:
    fedavg, folder = method_row(known, "fedavg"), known["folder"]
    return [
        [
            "all clients are scored in every scored round",
            f"{time_words(fedavg['seconds_scored'])} for {CLIENTS:,} of the tiny network",
            "the same and their passes",
            "a scoring in every round",
            "`evaluate_every`",
        ],
        [
            "all images lie in memory",
            f"{fedavg['mib_images']:.0f} MiB for {CLIENTS:,} clients of {IMAGES_EACH + 1} images of 28 x 28",
            "as the data set, and some kB a client",
            "data sets as large as the memory",
            "",
        ],
        [
            "10,000 cells in one folder",
            f"a worker's first look takes {time_words(folder['seconds_look_first'])}, one before each cell "
            f"{time_words(folder['seconds_look'])}; `run.json` {time_words(folder['seconds_status'])}",
            f"{byte_words(folder['bytes_status'])} of `run.json`, {byte_words(folder['bytes_report'])} of report",
            "not here",
            "",
        ],
    ]


def _states(known: Known) -> list[str]:
    rows = [row for row in known["states"] if "reason" not in row]
    own = [row["method"] for row in rows if row["client"] >= KEEPS_A_NETWORK]
    server = [row["method"] for row in rows if row["server"] >= KEEPS_A_NETWORK]
    small = [row for row in rows if row["method"] not in own and 0 < row["client"] < KEEPS_A_NETWORK]
    most = max((row["client"] for row in small), default=0.0)
    missing = [row["method"] for row in known["states"] if "reason" in row]
    apart = [row["method"] for row in rows if row["kept_apart"]]
    words = [
        f"- **A network for each client**: {', '.join(own)}; on the server: {', '.join(server)}.",
        f"- **At most {most:.1%} of a network for each client**: {', '.join(row['method'] for row in small)}. Clients "
        "of all others keep nothing.",
        f"- **Uploads are kept apart** in the rounds of {', '.join(apart)}.",
    ]
    return words + ([f"- Not measured: {', '.join(missing)}."] if missing else [])


def _streamed(known: Known) -> list[str]:
    joined = known["aggregation"][0]
    return [
        f"- **Uploads**, where the server takes the weighted mean: above {MAX_SEPARATE_BYTES // MIB} MiB they are "
        f"joined as they come. Of {joined['mib_sent']:.0f} MiB that were sent, "
        f"{joined['mib_held']:.0f} were held at most. Of a network of 1e8 parameters two uploads are held.",
        "- **Clients**: each is trained when its upload is asked for. On a GPU a stack of them trains together "
        "(`vmap`).",
        "- **Rows** of rounds and images are appended to files. A report reads them all at once.",
        "- **Results of an attack** are kept portion by portion, at most once a second.",
        "- **Not streamed**: views of an attack cell, clients' states, checkpoints, images.",
    ]


# ---- simulation ------------------------------------------------------------------------------------------------------
SIMULATION_HEAD = [
    "transformer, cut into", "cells", "GPUs", "hours", "GPU hours", "idle", "longest chain, h", "hours as in Llama 3",
    "hours, preempted", "workers lost", "GPU hours lost",
]  # fmt: skip


def _simulation_rows(known: Known) -> list[list[str]]:
    rows = []
    for row in known["scenarios"]:
        calm, rare, often = (row["lives"][name] for name in workload.LIVES)
        rows.append(
            [
                row["shape"],
                str(row["cells"]),
                str(row["workers"]),
                _hours(calm),
                f"{row['workers'] * calm['makespan'] / 3600:,.0f}",
                f"{calm['idle']:.0%}",
                f"{row['chain'] / 3600:.1f}",
                _hours(rare),
                _hours(often) if not often["given_up"] else f"given up after {_hours(often)}",
                f"{often['deaths']:.0f}",
                f"{often['lost'] / 3600:.1f}",
            ]
        )
    return rows


def _hours(figures: Mapping[str, float]) -> str:
    return f"{figures['makespan'] / 3600:.1f}"


def _simulation_words(known: Known) -> list[str]:
    return [
        "Workers are simulated by the code that they run: `eval.run.shared.worker` decides who takes which cell, "
        "claims are real files, and only the cells' time passes by a clock of its own. "
        f"A worker starts in {time_words(known['start'])}, as measured here. A training loses what it did since its "
        "last checkpoint, which is a minute old at most, or a round where that takes longer. An attack loses its last "
        f"portion, taken as {workload.PORTION} updates. Another worker starts as soon as one dies.",
        "",
        f"A GPU fails once in {workload.MEAN_LIFE / 86400 / 365:.1f} years, as in Llama 3's training (Table 5). "
        f"*Preempted* is an assumption: a machine lasts {workload.PREEMPTED / 3600:.0f} hours on average. The random "
        "deaths were drawn once for each row.",
    ]


def _bounds() -> list[str]:
    return [
        "- **No number of GPUs makes a run shorter than its longest training with the longest attack on it.** More "
        "cells than GPUs, of like length, keep them busy.",
        "- Cells are taken in the order of the config, trainings first, not the longest first. A long attack that "
        "comes last leaves other workers idle. Spreading the long ones helps.",
        "- Where cells are uneven, deaths cost more time than the work that they lose: a long attack may then begin "
        "late, and leave others idle.",
        "- Deaths lose little work where checkpoints are frequent. A round of all clients takes hours, and is kept "
        f"only when it is over. A cell is given up after {MOST_DEATHS} deaths since anything of it was last kept.",
        f"- `run.json` is written again after {SHARE_OF_TIME} times as long as that takes, so that `--watch` lags "
        "behind.",
    ]


def _checked(known: Known) -> list[str]:
    check = known["check"]
    calm, killed = check["runs"]
    return [
        f"**Checked** against runs of {calm['cells']:.0f} short cells by two workers of this machine. Their attacks "
        "only wait, so that other work here does not count. The simulation is told how long the cells took one worker, "
        f"when workers appeared, and when one was killed. Without a kill it says {calm['predicted']:.1f} s, and the "
        f"run took {calm['seconds']:.1f} s. With one worker killed by SIGKILL it says {killed['predicted']:.1f} s, "
        f"and the run took {killed['seconds']:.1f} s. That workers of one machine slow each other down is not modeled.",
    ]


# ---- in short --------------------------------------------------------------------------------------------------------
def _summary(known: Known) -> Sequence[str]:
    perceptron, transformer = gpus(known)
    whole, spread = (
        {row["workers"]: row["lives"]["nobody dies"]["makespan"] for row in known["scenarios"] if row["shape"] == name}
        for name in (workload.SHAPES[0].name, workload.SHAPES[1].name)
    )
    few, many = workload.WORKERS
    both = [gpu.training(0.01) + gpu.search(UPDATES) for gpu in (perceptron, transformer)]
    view = known["views"]["networks"] * NETWORK_BYTES
    return [
        f"- **Cost**: {time_words(both[0])} of one GPU where an image uses each weight once, {time_words(both[1])} "
        "for a transformer.",
        f"- **On {few} GPUs**: {time_words(spread[few])}, with the transformer's attack spread over a hundred cells. "
        f"**On {many} GPUs**: {time_words(spread[many])}, as the training stays on one of them.",
        f"- As one training and one attack it would take {time_words(whole[many])} on any number of GPUs, but the "
        "views do not fit into one.",
        f"- **Breaks first**: the memory for the views of one attack cell, at {GPU_BYTES // view:.0f} updates. Then "
        f"clients that keep a network each, at {GPU_BYTES // NETWORK_BYTES:.0f} clients.",
        "- **Streamed**: uploads into their mean, clients one by one. Not views, states or checkpoints.",
    ]
