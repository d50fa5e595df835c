// position: adds to each token the row of its position, of a table of learned positions.
//
//   y[t, i] += w[position + t - first_row, i]        t = 0 .. T-1
//   a position whose row lies in another piece of the table is left alone
//
// w     f32 [N, ROW_WORDS]   read        ROW_WORDS = 4 ceil(K/4)
// step  position, tokens, rows, produced
// y     f32 [T, K]           read_write
//
// One workgroup a token, folded over x and y. Needs no limit above WebGPU's defaults.

struct Params {
    rows: u32,
    k: u32,
    row_words: u32,
    first_row: u32,
}

override WORKGROUP: u32 = 64;

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<uniform> step: vec4<u32>;
@group(0) @binding(2) var<storage, read> w: array<f32>;
@group(0) @binding(3) var<storage, read_write> y: array<f32>;

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>,
        @builtin(num_workgroups) workgroups: vec3<u32>,
        @builtin(local_invocation_index) thread: u32) {
    let token = workgroup.x + workgroup.y * workgroups.x;
    // A position below first_row wraps to a large number.
    let row = step.x + token - params.first_row;
    if (token >= step.y || row >= params.rows) {
        return;
    }
    for (var i = thread; i < params.k; i += WORKGROUP) {
        y[token * params.k + i] += w[row * params.row_words + i];
    }
}
