"""Arguments of commands that no one should give."""

from __future__ import annotations

from hostile.sandbox import Sandbox, kind

NUMBERS = ("--seed", "--images", "--guidance-scale", "--temperature", "--top-k", "--top-p", "--height", "--width")
ODD = (
    "nan",
    "inf",
    "-inf",
    "-1",
    "0",
    "1e308",
    "1e-320",
    "1.5",
    "9" * 40,
    "-" + "9" * 40,
    "0x10",
    "١٢",
    "1_0",
    "",
    " ",
)


@kind("arguments")
def odd_numbers(box: Sandbox) -> list[str]:
    return box.generate(f"{box.choose(*NUMBERS)}={box.choose(*ODD)}")


@kind("arguments")
def several_odd_numbers(box: Sandbox) -> list[str]:
    return box.generate(*(f"{name}={box.choose(*ODD)}" for name in box.rng.sample(NUMBERS, 3)))


@kind("arguments")
def text_for_a_number(box: Sandbox) -> list[str]:
    return box.generate(f"{box.choose(*NUMBERS)}={box.text()}")


@kind("arguments")
def sizes_that_do_not_exist(box: Sandbox) -> list[str]:
    side = ("1", "7", "15", "16", "17", "100000", "2147483648")
    return box.generate(f"--height={box.choose(*side)}", f"--width={box.choose(*side)}", words=box.rng.random() < 0.5)


@kind("arguments")
def aspect_ratios(box: Sandbox) -> list[str]:
    return box.generate(f"--aspect-ratio={box.choose(*ODD)}", words=True)


@kind("arguments")
def contradicting_sizes(box: Sandbox) -> list[str]:
    return box.generate("--aspect-ratio=2", f"--height={box.choose(16, 256)}", words=box.rng.random() < 0.5)


@kind("arguments")
def pixel_budgets(box: Sandbox) -> list[str]:
    return ["generate", "--weights", str(box.models / "words"), f"--pixel-budget={box.text(4)}", "a fox"]


@kind("arguments")
def unknown_options(box: Sandbox) -> list[str]:
    return box.generate(f"--{box.choose('sed', 'methods', 'gpu', box.text(3))}={box.text(3)}")


@kind("arguments")
def unknown_commands(box: Sandbox) -> list[str]:
    return [box.choose("paint", "Generate", "", "-", "--", box.text(5)), box.text(3)]


@kind("arguments")
def nothing_or_too_much(box: Sandbox) -> list[str]:
    return [[], ["generate"], ["compare"], ["export"], ["words", "a", "b"], ["eval"], ["eval", "x"]][
        box.rng.randrange(7)
    ]


@kind("arguments")
def methods(box: Sandbox) -> list[str]:
    return box.generate(f"--method={box.text(8)}")


@kind("arguments")
def almost_methods(box: Sandbox) -> list[str]:
    names = ("nova", "truncate", "fastvar", "sparsevar", "toprovar", "skipvar", "compose", "none", "", "nova ")
    ends = (
        ":",
        ":x",
        ":-1",
        ":1",
        ":nan",
        ":alpha",
        ":alpha=",
        ":=1",
        ":alpha=x",
        ":alpha=1e400",
        "+",
        "+nova",
        ":balanced;",
    )
    return box.generate(f"--method={box.choose(*names)}{box.choose(*ends)}")


@kind("arguments")
def settings_of_methods(box: Sandbox) -> list[str]:
    field = box.choose("alpha", "t_est", "ratios", "cache", "metric", "x", "", box.text(3))
    value = box.choose("1", "-1", "nan", "[1]", "{}", "[" * 5000, '"x"', "null", "1e400", "True", box.text(4))
    return box.generate("--method=nova", f"--set={field}{box.choose('=', '==', '')}{value}")


@kind("arguments")
def lists_of_methods(box: Sandbox) -> list[str]:
    asked = box.choose("none", "none,none", ",", "nova,nova", "nova,x", "truncate:9", box.text(8))
    return ["compare", "3", "--weights", str(box.models / "labels"), f"--methods={asked}", "--device=cpu"]


@kind("arguments")
def names_of_presets(box: Sandbox) -> list[str]:
    name = box.choose("x", "../../../etc/passwd", "/etc/passwd", ".", "..", "/dev/null", "balanced.json", box.text(6))
    return box.generate("--method=nova", f"--preset={name}")


@kind("arguments")
def devices_and_dtypes(box: Sandbox) -> list[str]:
    option = box.choose("--device", "--dtype", "--runtime", "--quantize")
    value = box.choose("cuda", "cuda:99", "tpu", "meta", "cpu:x", "int8", "float64", "graphs", "fp4", "", box.text(3))
    return ["generate", "3", "--weights", str(box.models / "labels"), f"{option}={value}"]


@kind("arguments")
def outputs_that_cannot_be(box: Sandbox) -> list[str]:
    box.write("file", "x")
    (box.folder / "folder.png").mkdir()
    names = (
        "folder.png",
        "file/out.png",
        "out.xyz",
        "out",
        "",
        ".",
        "x" * 300 + ".png",
        "/proc/nextscale/out.png",
        "a\nb.png",
    )
    return box.generate(f"--out={box.choose(*names)}")


@kind("arguments")
def deep_outputs(box: Sandbox) -> list[str]:
    return box.generate(f"--out={'/'.join(['d' * 60] * box.rng.randint(2, 120))}/out.png")


@kind("arguments")
def traces_and_previews(box: Sandbox) -> list[str]:
    box.write("file", "x")
    option = box.choose("--trace", "--preview", "--animate")
    return box.generate(f"{option}={box.choose('file/x', 'x' * 300, '/proc/x/y', box.text(4))}")


@kind("arguments")
def shards(box: Sandbox) -> list[str]:
    prompts = box.write("meta.jsonl", '{"tag": "x", "include": [], "prompt": "a fox"}\n')
    shard = box.choose("0/1", "2/1", "1/0", "-1/2", "1", "a/b", "1/2/3", "1.5/2", box.text(3))
    return ["export", "geneval", "--prompts", prompts, "--out=out", f"--shard={shard}"]


@kind("arguments")
def benchmarks_and_metrics(box: Sandbox) -> list[str]:
    asked = box.choose("", ",", "psnr,", "x", "clip", box.text(5))
    return [["export", asked, "--out=out"], ["score", ".", f"--metrics={asked}"], ["eval", "sweep", asked or "x"]][
        box.rng.randrange(3)
    ]


@kind("arguments")
def figures(box: Sandbox) -> list[str]:
    return [
        "analyze",
        "3",
        "--weights",
        str(box.models / "labels"),
        f"--figures={box.choose('', ',', 'x', box.text(4))}",
    ]


@kind("arguments")
def sources_of_weights(box: Sandbox) -> list[str]:
    name = box.choose(
        "a/b", "a/b/c", "../x", "~nobody/x", "x" * 5000, "/", ".", "", "clipart/", "https://example.org/x", box.text(6)
    )
    return box.generate("--weights", name)


@kind("arguments")
def models_and_tokenizers(box: Sandbox) -> list[str]:
    option = box.choose("--model", "--vae", "--revision", "--text-encoder")
    return box.generate(f"{option}={box.choose('infinity-2b', 'x', '', '/', 'a/b', 'x' * 5000, box.text(4))}")


@kind("arguments")
def the_same_option_many_times(box: Sandbox) -> list[str]:
    return box.generate(*[f"--seed={i}" for i in range(box.rng.randint(2, 400))], f"--top-k={box.choose(*ODD)}")


@kind("arguments")
def folders_that_are_no_cases(box: Sandbox) -> list[str]:
    box.write("case/config.json", box.choose("{}", "[]", "x", '{"family": "var"}', "[" * 100000))
    return ["verify", box.choose("case", "nowhere", "case/config.json", box.text(4))]


@kind("arguments")
def conversions(box: Sandbox) -> list[str]:
    box.write("there/x", "x")
    out = box.choose("there", "there/x", "there/x/y", "x" * 300, "/proc/x", "")
    return ["convert", str(box.models / "labels"), out]
