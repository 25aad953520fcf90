// Which of the published cores core_engine.sv is built around comes as a macro.
`define CONTROL_REGISTER(address) address[7:2]
