"""The process that runs elements' firmware: `python -m dovetail.mesh.element_worker`, spoken to by `exact.py`.

A run's first set of inputs holds the element's data, and each further one what an input brings: messages by key, and
"dram N" for tensors. It answers with an inference per input: messages by key, and "stored".
"""

from __future__ import annotations

from dataclasses import replace

from dovetail.mesh.element_device import ElementDevice
from dovetail.simulate.protocol import InferenceResult, Json, RunRequest, SimulationResult, setup_from_json
from dovetail.simulate.worker_loop import Runner, serve


def load(setup: Json) -> Runner:
    """Note down the firmware; every run is a machine of its own."""
    found = setup_from_json(setup)

    def run(request: RunRequest) -> SimulationResult:
        """All inputs of one element."""
        from dovetail.simulate.machine import Machine

        machine = Machine(found)
        device = machine.devices[0]
        assert isinstance(device, ElementDevice)
        data, brought = request.inputs[0]["element_data"], request.inputs[1:]
        machine.write_symbol("element_data", data)
        device.inputs = len(brought)
        device.messages = [{int(k): v for k, v in one.items() if not k.startswith("dram")} for one in brought]
        device.tensors = [{int(k[5:]): v for k, v in one.items() if k.startswith("dram")} for one in brought]
        result = machine.run(RunRequest((), {}, request.instruction_limit))
        outputs = []
        for number in range(len(brought)):
            sent = device.sent[number] if number < len(device.sent) else {}
            named = {str(key): content for key, content in sent.items()}
            if number < len(device.stored):
                named["stored"] = device.stored[number]
            outputs.append(InferenceResult(named))
        outputs[0] = replace(outputs[0], instructions=result.executed_instructions, total_cycles=machine.cycles)
        return replace(result, inferences=tuple(outputs))

    return run


if __name__ == "__main__":
    serve(load)
