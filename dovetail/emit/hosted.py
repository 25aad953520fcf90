"""What makes a project of a network for this computer: a program around it, and its Makefile."""

from __future__ import annotations

from dovetail.build.instruction_sets import EMITTED_C
from dovetail.emit.c_text import one_line
from dovetail.emit.source import Unit, place
from dovetail.program.ir import View

_MAIN = """\
/* Runs @MODEL@: `./@MODEL@ INPUT... OUTPUT...`, raw files of the inputs, then of the outputs, in this order:
@PORTS@ */
#include <stdio.h>

#include "@MODEL@.h"

extern const char *dovetail_failure; /* of dovetail_rt.c */
extern int32_t dovetail_failure_status;

typedef struct {
    const char *name;
    uint8_t *first;
    size_t bytes;
} port;

static int transfer(const port *at, const char *path, const char *mode)
{
    FILE *file = fopen(path, mode);
    if (file == NULL) {
        fprintf(stderr, "@MODEL@: %s cannot be opened\\n", path);
        return 1;
    }
    const size_t done = mode[0] == 'r' ? fread(at->first, 1, at->bytes, file) : fwrite(at->first, 1, at->bytes, file);
    const int more = mode[0] == 'r' && fgetc(file) != EOF;
    const int failed = fclose(file) != 0 || done != at->bytes || more;
    if (failed) {
        fprintf(stderr, "@MODEL@: %s does not have the %lu bytes of %s\\n", path, (unsigned long)at->bytes, at->name);
    }
    return failed;
}

int main(int count, char **words)
{
    const port inputs[] = {
@INPUTS@
    };
    const port outputs[] = {
@OUTPUTS@
    };
    const int input_count = (int)(sizeof inputs / sizeof inputs[0]);
    const int output_count = (int)(sizeof outputs / sizeof outputs[0]);
    if (count != 1 + input_count + output_count) {
        fprintf(stderr, "usage: %s of %d inputs and %d outputs, as raw files\\n", words[0], input_count, output_count);
        return 2;
    }
    for (int i = 0; i < input_count; ++i) {
        if (transfer(&inputs[i], words[1 + i], "rb")) {
            return 1;
        }
    }
    @MODEL@_run();
    if (dovetail_failure != NULL) {
        fprintf(stderr, "@MODEL@: %s failed: it returned %d\\n", dovetail_failure, (int)dovetail_failure_status);
        return 1;
    }
    for (int i = 0; i < output_count; ++i) {
        if (transfer(&outputs[i], words[1 + input_count + i], "wb")) {
            return 1;
        }
    }
    return 0;
}
"""


def main_source(unit: Unit) -> str:
    """A program that reads the inputs from files and writes the outputs to files."""

    def port(name: str, view: View) -> str:
        """The initialiser of a port."""
        text = one_line(name).replace("\\", "\\\\").replace('"', '\\"')
        return f'        {{"{text}", {place(unit, view)}, {view.span[1] - view.span[0]}}},'

    program = unit.program
    ports = [f"   {one_line(name)}: {view.type}" for name, view in (*program.inputs.items(), *program.outputs.items())]
    text = _MAIN.replace("@MODEL@", unit.model).replace("@PORTS@", "\n".join(ports))
    inputs, outputs = ([port(*item) for item in ends.items()] for ends in (program.inputs, program.outputs))
    return text.replace("@INPUTS@", "\n".join(inputs)).replace("@OUTPUTS@", "\n".join(outputs))


def makefile(unit: Unit, sources: tuple[str, ...], optimisation: str) -> str:
    """Builds the program with this computer's compiler."""
    engines = unit.target.engines
    defines = " ".join(f"-D{name}={value}" for engine in engines for name, value in engine.defines.items())
    libraries = " ".join(dict.fromkeys(flag for engine in engines for flag in engine.libraries))
    return f"""# Builds {unit.model} for this computer. CC is any C99 compiler.
CC = cc
CFLAGS = -std=c99 {optimisation} {" ".join(EMITTED_C)}
DEFINES = -DDOVETAIL_HOST {defines}
LIBRARIES = {libraries}
SOURCES = {" ".join(sources)}

{unit.model}: $(SOURCES)
\t$(CC) $(CFLAGS) $(DEFINES) -Isrc -Iruntime -Idriver $(SOURCES) $(LIBRARIES) -o $@

clean:
\trm -f {unit.model}
.PHONY: clean
"""
