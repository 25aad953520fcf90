// The function unit of vexriscv_cfu: 16 sums of products of int8, eight at a time, and the steps of a requantisation.
//
// Its ports are those of VexRiscv's function-unit bus. An instruction is R-type in opcode custom-0; funct3 chooses what
// it does, funct7 the sum:
//
//   0  add       adds the products of the eight int8 of rs1 and rs2 and the eight that are held to the sum
//   1  take      rs1 plus the sum, which is zero from then on
//   2  hold      holds the eight int8 of rs1 and rs2
//   3  upper     rs1 * rs2 / 2^32, rounded to nearest (halves up); rs2 is unsigned
//   4  shifted   rs1 / 2^rs2, rounded to nearest, halves away from zero; rs2 is 1 to 31
//   5  saturate  rs1 limited to int8
//   6  lanes     adds the products of the four int8 of rs1 and of rs2 to four sums, from that of funct7 on
module vexriscv_cfu_unit (
    input             clk,
    input             reset,
    input             cmd_valid,
    output            cmd_ready,
    input      [ 9:0] cmd_payload_function_id,
    input      [31:0] cmd_payload_inputs_0,
    input      [31:0] cmd_payload_inputs_1,
    output            rsp_valid,
    input             rsp_ready,
    output     [31:0] rsp_payload_outputs_0
);
    wire [2:0] chosen = cmd_payload_function_id[2:0];
    wire [3:0] which = cmd_payload_function_id[6:3];
    wire signed [31:0] a = cmd_payload_inputs_0, b = cmd_payload_inputs_1;

    reg [63:0] held;
    wire signed [15:0] products [0:7];
    genvar lane;
    generate
        for (lane = 0; lane < 8; lane = lane + 1) begin : lanes
            wire [63:0] both = {b, a};
            wire signed [7:0] left = held[8 * lane +: 8], right = both[8 * lane +: 8];
            assign products[lane] = left * right;
        end
    endgenerate
    wire signed [31:0] low = products[0] + products[1] + products[2] + products[3];
    wire signed [31:0] dot = low + products[4] + products[5] + products[6] + products[7];

    wire signed [31:0] half = 32'sd1 <<< (b[4:0] - 5'd1);
    wire signed [32:0] raised = a + half + (a >>> 31);
    wire signed [32:0] shifted = raised >>> b[4:0];
    wire fits = a[31:7] == {25{a[31]}};

    // An answer stands in a register while the core's next stage takes it, so that instructions follow one another
    // every cycle. The long product is rounded there.
    reg answers, rounds;
    reg signed [64:0] answer;
    reg signed [31:0] sums [0:15];
    integer number;
    always @(posedge clk) begin
        if (reset) begin
            answers <= 1'b0;
            for (number = 0; number < 16; number = number + 1) sums[number] <= 32'd0;
        end else if (rsp_ready) begin
            answers <= cmd_valid;
            rounds <= chosen == 3'd3;
            if (cmd_valid)
                case (chosen)
                    3'd0: sums[which] <= sums[which] + dot;
                    3'd1: begin
                        answer <= {1'b0, a + sums[which], 32'd0};
                        sums[which] <= 32'd0;
                    end
                    3'd2: held <= {b, a};
                    3'd3: answer <= a * $signed({1'b0, b});
                    3'd4: answer <= {shifted, 32'd0};
                    3'd6:
                        for (number = 0; number < 4; number = number + 1)
                            sums[which + number[3:0]] <= sums[which + number[3:0]] +
                                $signed(a[8 * number +: 8]) * $signed(b[8 * number +: 8]);
                    default: answer <= {1'b0, fits ? a : {{25{a[31]}}, {7{!a[31]}}}, 32'd0};
                endcase
        end
    end
    assign cmd_ready = rsp_ready;
    assign rsp_valid = answers;
    assign rsp_payload_outputs_0 = answer[63:32] + {31'd0, rounds && answer[31]};
endmodule
