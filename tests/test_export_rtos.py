"""Exports beside an operating system: a task blocks while an engine works, and no completion is lost.

The systems are stood in for by threads of this computer (`tests/rtos`): an engine that holds its line up until its
driver has cleared it, a controller that calls the handler as long as the line is up and on, and semaphores.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from command_line import dovetail, refused
from dovetail.guests.export.write import export
from dovetail.run import open_build

RTOS = Path(__file__).parent / "rtos"
STRICT = ["-std=gnu99", "-Wall", "-Wextra", "-Wshadow", "-Werror", "-O1", "-pthread"]
FORMS = {"FreeRTOS": "make", "Zephyr": "zephyr", "FreeRTOS of ESP-IDF": "esp-idf"}


@pytest.fixture(scope="module")
def builds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The digits model beside an engine with a DMA, and for a core alone."""
    folder = tmp_path_factory.mktemp("rtos")
    assert dovetail("zoo", "digits", "-o", folder / "digits.onnx") == 0
    for target in ("macarray", "cortex_m4"):
        assert dovetail("compile", folder / "digits.onnx", "--target", target, "-o", folder / target) == 0
    return {target: folder / target for target in ("macarray", "cortex_m4")}


def made(system: str, build: Path, folder: Path) -> Path:
    """An export; its C file for the system."""
    form = FORMS[system]
    export(open_build(build), form, folder, freertos=form == "make")
    return folder / "src" / "digits_rtos.c"


def program(system: str, source: Path, folder: Path) -> Path:
    """The machine with that file; handlers call what the export says they shall."""
    own = folder / "own.c"
    macros = ["-DTAKE=digits_take", "-DGIVE=digits_give", f"-I{RTOS}", f"-I{source.parent}"]
    if system == "Zephyr":
        macros += [
            "-DCONFIG_DOVETAIL_DIGITS_MACARRAY_IRQ=5",
            "-DCONFIG_DOVETAIL_DIGITS_DMA_IRQ=6",
            "-Wno-cast-function-type",
        ]
        own.write_text("\n")
    else:
        macros += ["-DBEGIN=begin", *([f"-I{RTOS / 'freertos'}"] if system == "FreeRTOS" else [])]
        own.write_text(
            '#include "machine.h"\n#include "digits_rtos.h"\nvoid begin(void);\n'
            "void digits_lines(int on) { machine_line(on); }\n"
            "void begin(void) { machine_handler = digits_interrupt; digits_begin(); }\n"
        )
    built = folder / "program"
    command = ["cc", *STRICT, *macros, source, own, RTOS / "machine.c", "-o", built]
    subprocess.run(command, check=True)
    return built


@pytest.mark.parametrize("system", FORMS)
def test_no_completion_is_lost_and_tasks_take_turns(system: str, builds: dict[str, Path], tmp_path: Path) -> None:
    source = made(system, builds["macarray"], tmp_path / "library")
    found = subprocess.run([program(system, source, tmp_path)], capture_output=True, text=True, timeout=60)
    assert found.stdout == "done\n"


@pytest.mark.parametrize(
    ("fault", "by"),
    [
        ("    digits_lines(1);\n", ""),  # waits with its line off: the second job hangs
        ("    digits_lines(0);\n", ""),  # a handler that is called for ever
        ("    (void)xSemaphoreTake(turn, portMAX_DELAY);\n", ""),
    ],
)
def test_the_machine_finds_faults(fault: str, by: str, builds: dict[str, Path], tmp_path: Path) -> None:
    source = made("FreeRTOS", builds["macarray"], tmp_path / "library")
    text = source.read_text()
    assert fault in text
    source.write_text(text.replace(fault, by))
    try:
        found = subprocess.run([program("FreeRTOS", source, tmp_path)], capture_output=True, text=True, timeout=5)
        assert found.stdout != "done\n"
    except subprocess.TimeoutExpired:
        pass


@pytest.mark.parametrize("system", FORMS)
def test_the_sources_wait_by_the_hook(system: str, builds: dict[str, Path], tmp_path: Path) -> None:
    """Drivers call `dovetail_wait`, which is in the file for the system; a network of the core alone has only turns."""
    source = made(system, builds["macarray"], tmp_path / "library")
    assert "#define DOVETAIL_WAIT_HOOK 1" in (source.parent / "dovetail_rt.h").read_text()
    objects = []
    for path in source.parent.glob("*.c"):
        if path != source:
            subprocess.run(
                ["cc", "-std=gnu99", "-c", f"-I{source.parent}", path, "-o", tmp_path / f"{path.stem}.o"], check=True
            )
            objects.append(tmp_path / f"{path.stem}.o")
    wanted = subprocess.run(["nm", "-u", *objects], capture_output=True, text=True, check=True).stdout
    assert "dovetail_wait" in wanted.split()
    alone = made(system, builds["cortex_m4"], tmp_path / "alone").read_text()
    assert "_take(" in alone and "dovetail_wait" not in alone
    assert "DOVETAIL_WAIT_HOOK 1" not in (tmp_path / "alone" / "src" / "dovetail_rt.h").read_text()


def test_kconfig_asks_for_every_line(builds: dict[str, Path], tmp_path: Path) -> None:
    made("Zephyr", builds["macarray"], tmp_path / "library")
    text = (tmp_path / "library" / "Kconfig").read_text()
    assert "config DOVETAIL_DIGITS_MACARRAY_IRQ" in text and "config DOVETAIL_DIGITS_DMA_IRQ" in text


def test_one_system_at_a_time(builds: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, "export", builds["macarray"], "--to", "zephyr", "--rtos", "freertos", "-o", tmp_path / "x")
    assert "Zephyr" in said and not (tmp_path / "x").exists()
