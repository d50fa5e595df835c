// norm, quantize, glu, activate: one row of activations -> gate, norm, and f32 or integer activations. ACT, GATED,
// NORM, GAIN and ACTIVATION switch the stages; the steps that are left out cost nothing.
//
//   v[i] = x[t, i]                             ACT = 0
//   v[i] = act(x[t, 0, i]) * x[t, 1, i]        GATED = 1
//   v[i] = act(x[t, i])                        GATED = 0: activate
//                                              silu g / (1 + exp(-g)), relu max(g, 0), relu2 max(g, 0)^2,
//                                              gelu_tanh g / (1 + exp(-2 sqrt(2/pi) (g + 0.044715 g^3)))
//   v[i] = v[i] * (1 / sqrt(mean(v^2) + eps)) * gain[i]                    NORM = 1
//   ACTIVATION 0 (f32)  y[t, i] = v[i], + y[t, i] with ACCUMULATE
//   ACTIVATION 1 (a8)   m = max(max |v|, 1e-5), q = clamp(round(v * (127 / m)), -128, 127)
//   ACTIVATION 2 (a16)  q = clamp(round(v * (32639 / m)), -32639, 32639) = 256 * hi + lo, both int8
//   q_scale[t] = m / 127 or m / 32639; q_sums[t, b] = sum of q over block b of 64
//   A NaN or infinity in the row goes into q_scale, so that it cannot get lost.
//
// x        f32 [X_T, K] or [X_T, 2, K] read    LAST_ROWS: its last R rows are taken
// gain     f32 [K]                     read    GAIN only
// y        f32 [T, K]                  write   f32 only; read_write with ACCUMULATE
// q        u32 [T, ceil(K/64), P, 16]  write   integers only; four int8 a word, zero beyond K; P = 2 in a16: hi, lo
// q_scale  f32 [T]                     write
// q_sums   i32 [T, ceil(K/64)]         write
//
// One workgroup a row. WORKGROUP is a multiple of 16, at most 256.

const SILU: u32 = 1u;
const RELU2: u32 = 2u;
const RELU: u32 = 4u;
const A8: u32 = 1u;
const A16: u32 = 2u;
const ABSMAX_FLOOR: f32 = 1e-5;
const INFINITY_BITS: u32 = 0x7f800000u;

struct Params {
    k: u32,
    eps: f32,
}

override WORKGROUP: u32 = 256;
override ACT: u32 = 0;
override GATED: u32 = 1;
override NORM: u32 = 1;
override GAIN: u32 = 1;
override ACTIVATION: u32 = 0;
override LAST_ROWS: u32 = 0;
override ACCUMULATE: u32 = 0;

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<uniform> step: vec4<u32>;
@group(0) @binding(2) var<storage, read> x: array<f32>;
@group(0) @binding(3) var<storage, read> gain: array<f32>;
@group(0) @binding(4) var<storage, read_write> y: array<f32>;
@group(0) @binding(5) var<storage, read_write> q: array<u32>;
@group(0) @binding(6) var<storage, read_write> q_scale: array<f32>;
@group(0) @binding(7) var<storage, read_write> q_sums: array<i32>;

var<workgroup> squares: array<f32, WORKGROUP>;
var<workgroup> maxima: array<u32, WORKGROUP>;
var<workgroup> block_sums: array<atomic<i32>, 256>;

fn activate(g: f32) -> f32 {
    if (ACT == RELU) {
        return select(g, 0.0, g < 0.0);
    }
    if (ACT == RELU2) {
        let positive = max(g, 0.0);
        return positive * positive;
    }
    var z = g;
    if (ACT != SILU) {
        z = 1.5957691216 * (g + 0.044715 * g * g * g);
    }
    // Beyond -87 the quotient is zero to f32; the bound keeps exp() finite.
    return g / (1.0 + exp(min(-z, 87.0)));
}

// v[i] before the norm.
fn value(row: u32, i: u32) -> f32 {
    if (ACT == 0u) {
        return x[row * params.k + i];
    }
    if (GATED == 0u) {
        return activate(x[row * params.k + i]);
    }
    let gate = 2u * row * params.k + i;
    return activate(x[gate]) * x[gate + params.k];
}

fn gained(v: f32, i: u32) -> f32 {
    if (GAIN == 1u) {
        return v * gain[i];
    }
    return v;
}

// Zero beyond the columns.
fn value_or_zero(row: u32, i: u32) -> f32 {
    if (i < params.k) {
        return value(row, i);
    }
    return 0.0;
}

fn gained_bits(v: f32, i: u32) -> u32 {
    return bitcast<u32>(gained(v, min(i, params.k - 1u))) & 0x7fffffffu;
}

struct Totals {
    squares: f32,
    max_bits: u32,
}

// Every thread gets the totals. The largest |v| is taken over bit patterns, where NaN is above infinity.
fn reduce(thread: u32, sum: f32, max_bits: u32) -> Totals {
    squares[thread] = sum;
    maxima[thread] = max_bits;
    workgroupBarrier();
    if (thread < 16u) {
        var s = 0.0;
        var m = 0u;
        for (var i = thread; i < WORKGROUP; i += 16u) {
            s += squares[i];
            m = max(m, maxima[i]);
        }
        squares[thread] = s;
        maxima[thread] = m;
    }
    workgroupBarrier();
    var totals = Totals(0.0, 0u);
    for (var i = 0u; i < 16u; i++) {
        totals.squares += squares[i];
        totals.max_bits = max(totals.max_bits, maxima[i]);
    }
    return totals;
}

fn integer_limit() -> f32 {
    return select(127.0, 32639.0, ACTIVATION == A16);
}

fn integer(row: u32, i: u32, factor: f32, to_integer: f32) -> i32 {
    if (i >= params.k) {
        return 0;
    }
    let lowest = select(-128.0, -32639.0, ACTIVATION == A16);
    return i32(clamp(round(gained(value(row, i), i) * factor * to_integer), lowest, integer_limit()));
}

fn pack_bytes(v: vec4<i32>) -> u32 {
    let b = bitcast<vec4<u32>>(v) & vec4<u32>(255u);
    return b.x | (b.y << 8u) | (b.z << 16u) | (b.w << 24u);
}

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>,
        @builtin(num_workgroups) workgroups: vec3<u32>,
        @builtin(local_invocation_index) thread: u32) {
    let out_row = workgroup.x + workgroup.y * workgroups.x;
    var row = out_row;
    if (LAST_ROWS == 1u) {
        row += step.y - step.z;
    }
    let k = params.k;

    var factor = 1.0;
    var max_bits = 0u;
    if (NORM == 1u || ACTIVATION != 0u) {
        var sum = 0.0;
        var largest = 0u;
        // Four columns at a time and in the order of linear_fused.wgsl, so that both give the same bits.
        for (var i = thread * 4u; i < k; i += WORKGROUP * 4u) {
            let v = vec4<f32>(value(row, i), value_or_zero(row, i + 1u), value_or_zero(row, i + 2u),
                              value_or_zero(row, i + 3u));
            sum += dot(v, v);
            largest = max(largest, max(max(gained_bits(v.x, i), gained_bits(v.y, i + 1u)),
                                       max(gained_bits(v.z, i + 2u), gained_bits(v.w, i + 3u))));
        }
        let totals = reduce(thread, sum, largest);
        max_bits = totals.max_bits;
        if (NORM == 1u) {
            factor = inverseSqrt(totals.squares / f32(k) + params.eps);
        }
    }

    if (ACTIVATION == 0u) {
        for (var i = thread; i < k; i += WORKGROUP) {
            let v = gained(value(row, i), i) * factor;
            if (ACCUMULATE == 1u) {
                y[out_row * k + i] += v;
            } else {
                y[out_row * k + i] = v;
            }
        }
        return;
    }

    let limit = integer_limit();
    let absmax = max(bitcast<f32>(max_bits) * factor, ABSMAX_FLOOR);
    let to_integer = limit / absmax;
    if (thread == 0u) {
        q_scale[out_row] = select(absmax / limit, bitcast<f32>(max_bits), max_bits >= INFINITY_BITS);
    }
    let blocks = (k + 63u) / 64u;
    // 256 blocks a round: one round up to 16384 columns.
    for (var first = 0u; first < blocks; first += 256u) {
        for (var i = thread; i < 256u; i += WORKGROUP) {
            atomicStore(&block_sums[i], 0);
        }
        workgroupBarrier();
        for (var word = first * 16u + thread; word < min(first + 256u, blocks) * 16u; word += WORKGROUP) {
            let i = word * 4u;
            let v = vec4<i32>(integer(row, i, factor, to_integer), integer(row, i + 1u, factor, to_integer),
                              integer(row, i + 2u, factor, to_integer), integer(row, i + 3u, factor, to_integer));
            let block = out_row * blocks + (word >> 4u);
            if (ACTIVATION == A16) {
                let low = ((v + 128) & vec4<i32>(255)) - 128;
                let at = block * 32u + (word & 15u);
                q[at] = pack_bytes((v - low) >> vec4<u32>(8u));
                q[at + 16u] = pack_bytes(low);
            } else {
                q[block * 16u + (word & 15u)] = pack_bytes(v);
            }
            atomicAdd(&block_sums[(word >> 4u) - first], v.x + v.y + v.z + v.w);
        }
        workgroupBarrier();
        for (var i = thread; i < min(256u, blocks - first); i += WORKGROUP) {
            q_sums[out_row * blocks + first + i] = atomicLoad(&block_sums[i]);
        }
    }
}
