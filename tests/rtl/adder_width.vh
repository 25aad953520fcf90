`define WIDTH 128
