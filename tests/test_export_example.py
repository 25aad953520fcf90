"""Programs for boards: they build, run a test vector and say pass; a wrong byte is found."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from command_line import dovetail, refused
from test_export_qemu import Machine, _arm, linked

ARM = shutil.which("arm-none-eabi-gcc") and shutil.which("qemu-system-arm")
needs_arm = pytest.mark.skipif(not ARM, reason="arm-none-eabi-gcc or qemu-system-arm is not installed")


@pytest.fixture(scope="module")
def builds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`digits` for parts, in folders of their names."""
    folder = tmp_path_factory.mktemp("builds")
    assert dovetail("zoo", "digits", "-o", folder / "digits.onnx") == 0
    for part in ("stm32f446", "rp2040", "cortex_m0plus"):
        assert dovetail("compile", folder / "digits.onnx", "--target", part, "-o", folder / part) == 0
    return folder


def said(elf: Path, *options: str, lines: int = 1) -> list[str]:
    """The first lines a program prints on a machine of QEMU's, which is then ended."""
    command = ["qemu-system-arm", *options, "-nographic", "-monitor", "none", "-kernel", str(elf)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, stdin=subprocess.DEVNULL) as running:
        assert running.stdout is not None
        try:
            return [running.stdout.readline() for _ in range(lines)]
        finally:
            running.kill()


STM32 = ("-M", "netduinoplus2", "-serial", "null", "-serial", "stdio")
"""An STM32F405: the same addresses of flash, RAM and USART2 as the F446; no PLL, no counter of cycles."""


@needs_arm
def test_a_program_for_stm32_says_pass(builds: Path, tmp_path: Path) -> None:
    folder = tmp_path / "program"
    assert dovetail("export", builds / "stm32f446", "--example", "stm32cube", "-o", folder) == 0
    subprocess.run(["make", "-s", "-C", folder], check=True, stdout=subprocess.DEVNULL)
    best = re.search(r"class (\d+), N cycles, pass", (folder / "README.md").read_text())
    assert best is not None
    assert re.fullmatch(rf"digits: class {best[1]}, \d+ cycles, pass\n", said(folder / "digits_example.elf", *STM32)[0])
    vector = folder / "vector.h"
    vector.write_text(re.sub(r"(output_0\[\] = \{\n +)\d+", r"\g<1>77", vector.read_text()))
    subprocess.run(["make", "-s", "-C", folder], check=True, stdout=subprocess.DEVNULL)
    assert said(folder / "digits_example.elf", *STM32)[0].endswith("FAIL\n")


@needs_arm
def test_its_layers_are_printed(builds: Path, tmp_path: Path) -> None:
    folder = tmp_path / "program"
    assert dovetail("export", builds / "stm32f446", "--example", "stm32cube", "-o", folder) == 0
    subprocess.run(["make", "-s", "-C", folder, "cycles"], check=True, stdout=subprocess.DEVNULL)
    names = [line.split()[0] for line in said(folder / "digits_layers.elf", *STM32, lines=11)]
    assert names[1:3] == ["conv_1", "conv_2"] and names[-1] == "softmax_10"


@needs_arm
def test_layers_are_counted_without_a_cycle_counter(builds: Path, tmp_path: Path) -> None:
    """Cortex-M0+ has SysTick alone."""
    assert dovetail("export", builds / "cortex_m0plus", "--to", "make", "-o", tmp_path / "net") == 0
    machine = Machine("cortex_m0plus", _arm("cortex-m0"), sizes=(256 << 10, 16 << 10))
    flags = ["CC=arm-none-eabi-gcc", "AR=arm-none-eabi-ar", f"CPU={' '.join(machine.flags)}"]
    subprocess.run(["make", "-s", "-C", tmp_path / "net", *flags, "HOOKS=-DDOVETAIL_MARK_HOOK"], check=True)
    (tmp_path / "net" / "libdigits.a").rename(tmp_path / "net" / "libnet.a")
    shutil.copy(tmp_path / "net" / "example" / "cycles.c", tmp_path / "main.c")
    elf = linked(machine, tmp_path)
    semihosting = (
        "-M",
        "microbit",
        "-icount",
        "shift=6",
        "-serial",
        "none",
        "-semihosting-config",
        "enable=on,target=native",
    )
    command = ["qemu-system-arm", *semihosting, "-nographic", "-monitor", "none", "-kernel", str(elf)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True, stdin=subprocess.DEVNULL)
    counts = dict(line.split() for line in (run.stdout + run.stderr).splitlines())
    assert int(counts["conv_2"]) > int(counts["dense_9"]) > 0


@pytest.mark.skipif(not shutil.which("cmake"), reason="cmake is not installed")
def test_cmake_links_the_cycles(builds: Path, tmp_path: Path) -> None:
    """Both programs are linked: the network with marks is a library of its own."""
    assert dovetail("export", builds / "cortex_m0plus", "--to", "cmake", "-o", tmp_path / "net") == 0
    options = ["-DDIGITS_CYCLES=ON", "-DCMAKE_C_FLAGS=-DDOVETAIL_CYCLES=0u"]
    subprocess.run(
        ["cmake", "-S", tmp_path / "net", "-B", tmp_path / "made", *options], check=True, stdout=subprocess.DEVNULL
    )
    subprocess.run(["cmake", "--build", tmp_path / "made"], check=True, stdout=subprocess.DEVNULL)
    assert (tmp_path / "made" / "digits_cycles").is_file() and (tmp_path / "made" / "digits_example").is_file()


@pytest.mark.skipif("PICO_SDK_PATH" not in os.environ, reason="PICO_SDK_PATH does not name a Pico SDK")
def test_the_sdk_builds_a_program_for_the_pico(builds: Path, tmp_path: Path) -> None:
    folder = tmp_path / "program"
    assert dovetail("export", builds / "rp2040", "--example", "pico", "-o", folder) == 0
    options = ["-DDIGITS_CYCLES=ON"] + ([] if shutil.which("picotool") else ["-DPICO_NO_PICOTOOL=1"])
    subprocess.run(["cmake", "-S", folder, "-B", tmp_path / "made", *options], check=True, stdout=subprocess.DEVNULL)
    subprocess.run(["cmake", "--build", tmp_path / "made"], check=True, stdout=subprocess.DEVNULL)
    assert (tmp_path / "made" / "digits_example.bin").is_file() and (tmp_path / "made" / "digits_layers.bin").is_file()


def test_a_zephyr_application_names_its_module(builds: Path, tmp_path: Path) -> None:
    """Options that are set are options the module has; Zephyr itself is not built."""
    folder = tmp_path / "program"
    assert dovetail("export", builds / "rp2040", "--example", "zephyr-app", "-o", folder) == 0
    options = re.findall(r"^CONFIG_(DOVETAIL_\w+)=", (folder / "prj.conf").read_text(), re.MULTILINE)
    assert options and all(f"config {name}\n" in (folder / "network" / "Kconfig").read_text() for name in options)


def test_what_an_example_is_not_for(builds: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = ["-o", tmp_path / "program"]
    assert "not for 'rp2040'" in refused(capsys, "export", builds / "rp2040", "--example", "stm32cube", *out)
    assert "give one of them" in refused(capsys, "export", builds / "rp2040", *out)
    both = ["--example", "pico", "--to", "make"]
    assert "give one of them" in refused(capsys, "export", builds / "rp2040", *both, *out)
