// sample: draws the next token of each row; accept.wgsl does the bookkeeping. All sums that decide something are sums of
// integers, so the order in which threads arrive cannot change the draw.
//
//   l[i] = penalized logit (as in argmax, drafts included) * inv_temperature, m = max l
//   1. top-k   keep l[i] >= the k-th largest l                                  (0 keeps all)
//   2.         e[i] = exp(l[i] - m), Z = sum of kept e, w[i] = u32(e[i] * (2^30 / Z))
//   3. top-p   W = sum of kept w; keep the largest l until their w reach u32(ceil(top_p * f32(W)))   (1 keeps all)
//   4. min-p   keep l[i] >= m + ln(min_p)
//   5. draw    W' = sum of kept w, r = floor(u * W' / 2^32); the first i whose running sum of kept w exceeds r
//   Ties are kept in 1 and 3. u = pcg(pcg(pcg(seed_lo) ^ seed_hi) + position + T - R + r + 1), the new token's position.
//   picks[r] = the key of m, which says whether the numbers are sound, and i
//
// logits    f32 [R, V]          read
// sampling  u32 [8]             read   inv_temperature, top_k (u32), top_p, ln(min_p), penalty, 1 / penalty, seed_lo, seed_hi
// ids       u32 [R]             read
// seen      u32 [ceil(V/32)]    read   bit i % 32 of word i / 32
// picks     u32 [R, 1, 2]       write  key, id
//
// One workgroup of WORKGROUP = 256 a row (along z): a thread a histogram bin. 10.3 KiB of workgroup memory.

const INVALID: u32 = 0xffffffffu;
// key() of minus infinity and of infinity; finite numbers lie between, NaN above.
const LOWEST_KEY: u32 = 0x007fffffu;
const HIGHEST_KEY: u32 = 0xff800000u;
const TOTAL: f32 = 1073741824.0;
// Logits share their leading bits, so threads would queue for a few bins: eight histograms share the load.
const COPIES: u32 = 8u;

struct Params {
    vocabulary: u32,
}

override WORKGROUP: u32 = 256;

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<uniform> step: vec4<u32>;
@group(0) @binding(2) var<storage, read> logits: array<f32>;
@group(0) @binding(3) var<storage, read> sampling: array<u32>;
@group(0) @binding(4) var<storage, read> ids: array<u32>;
@group(0) @binding(5) var<storage, read> seen: array<u32>;
@group(0) @binding(6) var<storage, read_write> picks: array<u32>;

var<workgroup> bins: array<atomic<u32>, 2048>;
var<workgroup> counts: array<u32, 256>;
var<workgroup> floats: array<f32, 256>;
var<workgroup> groups: array<u32, 16>;
var<workgroup> found_prefix: u32;
var<workgroup> found_above: u32;

fn was_seen(row: u32, i: u32) -> bool {
    var found = (seen[i >> 5u] & (1u << (i & 31u))) != 0u;
    for (var draft = 1u; draft <= row; draft++) {
        found = found || ids[draft] == i;
    }
    return found;
}

fn scaled(row: u32, i: u32) -> f32 {
    var l = logits[row * params.vocabulary + i];
    if (was_seen(row, i)) {
        l *= select(bitcast<f32>(sampling[4]), bitcast<f32>(sampling[5]), l > 0.0);
    }
    return l * bitcast<f32>(sampling[0]);
}

// Unsigned integers in the order of the floats; both zeros alike, NaN above all.
fn key(value: f32) -> u32 {
    let bits = bitcast<u32>(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) {
        return 0xffffffffu;
    }
    if (bits == 0x80000000u) {
        return 0x80000000u;
    }
    return select(bits | 0x80000000u, ~bits, (bits & 0x80000000u) != 0u);
}

fn value_of(k: u32) -> f32 {
    return bitcast<f32>(select(~k, k & 0x7fffffffu, (k & 0x80000000u) != 0u));
}

fn weight(l: f32, m: f32, unit: f32) -> u32 {
    return u32(exp(l - m) * unit);
}

fn pcg(v: u32) -> u32 {
    let state = v * 747796405u + 2891336453u;
    let word = ((state >> ((state >> 28u) + 4u)) ^ state) * 277803737u;
    return (word >> 22u) ^ word;
}

// floor(a * b / 2^32)
fn high_product(a: u32, b: u32) -> u32 {
    let al = a & 0xffffu;
    let ah = a >> 16u;
    let bl = b & 0xffffu;
    let bh = b >> 16u;
    let middle = ah * bl + ((al * bl) >> 16u);
    let other = al * bh + (middle & 0xffffu);
    return ah * bh + (middle >> 16u) + (other >> 16u);
}

// The sum of the groups and counts above this thread's own bin, once `counts` is written.
fn sum_above(thread: u32) -> u32 {
    workgroupBarrier();
    if (thread < 16u) {
        var sum = 0u;
        for (var i = 0u; i < 16u; i++) {
            sum += counts[thread * 16u + i];
        }
        groups[thread] = sum;
    }
    workgroupBarrier();
    var above = 0u;
    for (var g = (thread >> 4u) + 1u; g < 16u; g++) {
        above += groups[g];
    }
    for (var i = thread + 1u; i < ((thread >> 4u) + 1u) * 16u; i++) {
        above += counts[i];
    }
    return above;
}

// The key at which a sum over the keys from the greatest down first reaches `wanted` >= 1: of ones (unit = 0),
// or of weights. Digit by digit of eight bits. 0 where it never does.
fn select_key(thread: u32, row: u32, wanted: u32, m: f32, unit: f32) -> u32 {
    var prefix = 0u;
    var rest = wanted;
    for (var level = 0u; level < 4u; level++) {
        let shift = 24u - 8u * level;
        for (var copy = 0u; copy < COPIES; copy++) {
            atomicStore(&bins[copy * 256u + thread], 0u);
        }
        workgroupBarrier();
        for (var i = thread; i < params.vocabulary; i += WORKGROUP) {
            let l = scaled(row, i);
            let k = key(l);
            // A shift by 32 is not defined: two shifts of at most 24 and 8.
            if ((k >> shift) >> 8u == prefix) {
                var amount = 1u;
                if (unit > 0.0) {
                    amount = weight(l, m, unit);
                }
                if (amount > 0u) {
                    atomicAdd(&bins[(thread & (COPIES - 1u)) * 256u + ((k >> shift) & 255u)], amount);
                }
            }
        }
        workgroupBarrier();
        var own = 0u;
        for (var copy = 0u; copy < COPIES; copy++) {
            own += atomicLoad(&bins[copy * 256u + thread]);
        }
        counts[thread] = own;
        if (thread == 0u) {
            found_prefix = INVALID;
        }
        let above = sum_above(thread);
        if (above < rest && own >= rest - above) {
            found_prefix = thread;
            found_above = above;
        }
        let digit = workgroupUniformLoad(&found_prefix);
        if (digit == INVALID) {
            return 0u;
        }
        prefix = (prefix << 8u) | digit;
        rest -= workgroupUniformLoad(&found_above);
    }
    return prefix;
}

fn largest_key(thread: u32, row: u32) -> u32 {
    var own = 0u;
    for (var i = thread; i < params.vocabulary; i += WORKGROUP) {
        own = max(own, key(scaled(row, i)));
    }
    counts[thread] = own;
    workgroupBarrier();
    if (thread < 16u) {
        for (var i = thread; i < WORKGROUP; i += 16u) {
            own = max(own, counts[i]);
        }
        groups[thread] = own;
    }
    workgroupBarrier();
    var all = 0u;
    for (var i = 0u; i < 16u; i++) {
        all = max(all, groups[i]);
    }
    workgroupBarrier();
    return all;
}

// Sum of exp(l - m) over the keys >= lowest, always in the same order.
fn sum_of_exponentials(thread: u32, row: u32, lowest: u32, m: f32) -> f32 {
    var own = 0.0;
    for (var i = thread; i < params.vocabulary; i += WORKGROUP) {
        let l = scaled(row, i);
        if (key(l) >= lowest) {
            own += exp(l - m);
        }
    }
    floats[thread] = own;
    workgroupBarrier();
    if (thread < 16u) {
        var sum = 0.0;
        for (var i = thread; i < WORKGROUP; i += 16u) {
            sum += floats[i];
        }
        floats[thread] = sum;
    }
    workgroupBarrier();
    var sum = 0.0;
    for (var i = 0u; i < 16u; i++) {
        sum += floats[i];
    }
    return sum;
}

// A contiguous run of ids a thread, for the draw goes by index.
fn run_weight(thread: u32, row: u32, run: u32, lowest: u32, m: f32, unit: f32) -> u32 {
    var sum = 0u;
    for (var i = thread * run; i < min((thread + 1u) * run, params.vocabulary); i++) {
        let l = scaled(row, i);
        if (key(l) >= lowest) {
            sum += weight(l, m, unit);
        }
    }
    return sum;
}

// First id of the thread's run at which the running sum of kept weights exceeds r.
fn first_beyond(thread: u32, row: u32, run: u32, lowest: u32, m: f32, unit: f32, r: u32) -> u32 {
    var id = INVALID;
    var sum = 0u;
    for (var i = thread * run; i < min((thread + 1u) * run, params.vocabulary); i++) {
        let l = scaled(row, i);
        if (key(l) >= lowest) {
            sum += weight(l, m, unit);
            id = i;
            if (sum > r) {
                break;
            }
        }
    }
    return id;
}

fn finish(row: u32, key: u32, id: u32) {
    picks[2u * row] = key;
    picks[2u * row + 1u] = id;
}

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>,
        @builtin(local_invocation_index) thread: u32) {
    let row = workgroup.z;
    let random = pcg(pcg(pcg(sampling[6]) ^ sampling[7]) + step.x + step.y - step.z + row + 1u);
    let top_k = sampling[1];
    let top_p = bitcast<f32>(sampling[2]);

    let highest = largest_key(thread, row);
    let m = value_of(highest);
    var lowest = 0u;
    if (top_k > 0u && top_k < params.vocabulary) {
        lowest = select_key(thread, row, top_k, m, 0.0);
    }
    let unit = TOTAL / sum_of_exponentials(thread, row, lowest, m);
    let run = (params.vocabulary + WORKGROUP - 1u) / WORKGROUP;
    workgroupBarrier();

    if (top_p < 1.0) {
        counts[thread] = run_weight(thread, row, run, lowest, m, unit);
        let above = sum_above(thread);
        if (thread == 0u) {
            found_above = above + counts[0];
        }
        let all = workgroupUniformLoad(&found_above);
        // At most what the kept ones weigh, so that the sum is reached among them.
        let wanted = clamp(u32(ceil(top_p * f32(all))), 1u, all);
        lowest = max(lowest, select_key(thread, row, wanted, m, unit));
    }
    // By key, so that a tie with the threshold is decided as it is in the comparison of floats.
    lowest = max(lowest, key(m + bitcast<f32>(sampling[3])));

    workgroupBarrier();
    let own = run_weight(thread, row, run, lowest, m, unit);
    counts[WORKGROUP - 1u - thread] = own;
    // Mirrored, so that the sum above a bin is the sum of the runs before this one.
    let mirrored = sum_above(WORKGROUP - 1u - thread);
    if (thread == WORKGROUP - 1u) {
        found_above = mirrored + own;
    }
    let all = workgroupUniformLoad(&found_above);
    let r = high_product(random, all);
    if (highest <= LOWEST_KEY || highest >= HIGHEST_KEY) {
        if (thread == 0u) {
            finish(row, highest, INVALID);
        }
    } else if (mirrored <= r && r - mirrored < own) {
        finish(row, highest, first_beyond(thread, row, run, lowest, m, unit, r - mirrored));
    }
}
