"""`dovetail export`: a network as a library in the form another build system takes, or as a program for a board.

| form | is |
|---|---|
| `cmake` | a project with a library target, installed with a package file for `find_package` |
| `make` | a Makefile that makes a static library |
| `arduino` | a library for the Arduino IDE and its command line |
| `platformio` | a library with `library.json` |
| `zephyr` | a module: `zephyr/module.yml`, Kconfig, CMakeLists.txt |
| `esp-idf` | a component |
| `cmsis-pack` | sources and the description a pack is made from |

Each has an example program. `library.py` has what compiles and runs a network without its surroundings, perhaps beside
an operating system, `write.py` the forms, `example.py` programs for boards.
"""

from dovetail.names import names

__getattr__ = names(__name__, {"dovetail.guests.export.write": ("export",)})
