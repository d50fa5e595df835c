// weigh: the weights of `part` logits of a row, summed so that draw.wgsl finds thresholds without reading all logits.
//
//   l[i] = penalized logit (as in argmax, drafts included) * inv_temperature, m = max l: of the greatest key of picks
//   w[i] = u32(exp(l[i] - m) * 2^31), bin[i] = min(u32((m - l[i]) * 11.5), 255): what lies in bin 255 weighs nothing
//   with top-k or top-p:  bins[r, part, b] = sum of w, and number of i, with bin[i] <= min(b, 254)
//                         keys[r, part]    = key(l[i]) with bin[i] < 255, bin after bin, in any order within one
//   else:                 bins[r, part, 255] = sum of w where l[i] >= m + ln(min_p); the rest stays as it is
//   A sum is two words: its low 32 bits, and number * 2^16 + its high bits.
//
// logits    f32 [R, V]                    read
// sampling  u32 [8]                       read   inv_temperature, top_k (u32), top_p, ln(min_p), penalty, 1 / penalty
// ids       u32 [R]                       read
// seen      u32 [ceil(V/32)]              read   bit i % 32 of word i / 32
// picks     u32 [R, PARTS, 2]             read   key of the greatest penalized logit of a part, id
// bins      u32 [R, PARTS, 256, 2]        read_write
// keys      u32 [R, PARTS, PART]          read_write
//
// One workgroup of WORKGROUP = 256 a part (along x; PARTS = ceil(V / PART), PART at most 1024) and row (z): a thread a
// bin, and up to four logits. 7.3 KiB of workgroup memory.

const ONE: f32 = 2147483648.0;
const BINS_A_NAT: f32 = 11.5;
const LAST_BIN: u32 = 255u;

override WORKGROUP: u32 = 256;
override V: u32 = 1024;
override PART: u32 = 1024;
override PARTS: u32 = 1;

@group(0) @binding(2) var<storage, read> logits: array<f32>;
@group(0) @binding(3) var<storage, read> sampling: array<u32>;
@group(0) @binding(4) var<storage, read> ids: array<u32>;
@group(0) @binding(5) var<storage, read> seen: array<u32>;
@group(0) @binding(6) var<storage, read> picks: array<u32>;
@group(0) @binding(7) var<storage, read_write> bins: array<u32>;
@group(0) @binding(8) var<storage, read_write> keys: array<u32>;

// Of each bin; the sums of weights as those of their low and of their high 16 bits.
var<workgroup> counts: array<atomic<u32>, 256>;
var<workgroup> lows: array<atomic<u32>, 256>;
var<workgroup> highs: array<atomic<u32>, 256>;
var<workgroup> scratch: array<vec4<u32>, 256>;
var<workgroup> groups: array<vec4<u32>, 16>;

fn was_seen(row: u32, i: u32) -> bool {
    var found = (seen[i >> 5u] & (1u << (i & 31u))) != 0u;
    for (var draft = 1u; draft <= row; draft++) {
        found = found || ids[draft] == i;
    }
    return found;
}

fn scaled(row: u32, i: u32) -> f32 {
    var l = logits[row * V + i];
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

// Of a key, not of a logit, so that nothing is contracted with the product by 1 / temperature.
fn weight(k: u32, m: f32) -> u32 {
    let d = value_of(k) - m;
    return u32(select(exp(d), 1.0, d == 0.0) * ONE);
}

fn bin_of(k: u32, m: f32) -> u32 {
    return min(u32(min((m - value_of(k)) * BINS_A_NAT, 255.0)), LAST_BIN);
}

// (low, high, number, -)
fn add(a: vec4<u32>, b: vec4<u32>) -> vec4<u32> {
    let low = a.x + b.x;
    return vec4<u32>(low, a.y + b.y + select(0u, 1u, low < a.x), a.z + b.z, 0u);
}

fn halves(low: u32, high: u32) -> vec4<u32> {
    return add(vec4<u32>(low, 0u, 0u, 0u), vec4<u32>(high << 16u, high >> 16u, 0u, 0u));
}

// The sum over the threads before this one.
fn sum_before(thread: u32, own: vec4<u32>) -> vec4<u32> {
    scratch[thread] = own;
    workgroupBarrier();
    if (thread < 16u) {
        var sum = vec4<u32>();
        for (var i = 0u; i < 16u; i++) {
            sum = add(sum, scratch[thread * 16u + i]);
        }
        groups[thread] = sum;
    }
    workgroupBarrier();
    var before = vec4<u32>();
    // Loops of known length, for a compiler to unroll.
    for (var i = 0u; i < 16u; i++) {
        before = add(before, select(vec4<u32>(), groups[i], i < (thread >> 4u)));
    }
    for (var i = 0u; i < 16u; i++) {
        before = add(before, select(vec4<u32>(), scratch[(thread & 0xf0u) + i], i < (thread & 15u)));
    }
    return before;
}

// The key of m, from the greatest penalized logit of each part.
fn greatest_key(thread: u32, row: u32) -> u32 {
    var own = 0u;
    for (var part = thread; part < PARTS; part += WORKGROUP) {
        own = max(own, picks[2u * (row * PARTS + part)]);
    }
    scratch[thread].x = own;
    workgroupBarrier();
    if (thread < 16u) {
        for (var i = thread; i < WORKGROUP; i += 16u) {
            own = max(own, scratch[i].x);
        }
        groups[thread].x = own;
    }
    workgroupBarrier();
    for (var i = 0u; i < 16u; i++) {
        own = max(own, groups[i].x);
    }
    workgroupBarrier();
    return key(value_of(own) * bitcast<f32>(sampling[0]));
}

fn write_sum(at: u32, sum: vec4<u32>) {
    bins[2u * at] = sum.x;
    bins[2u * at + 1u] = (sum.z << 16u) | sum.y;
}

fn count(own_bin: u32, k: u32, m: f32) {
    if (own_bin < LAST_BIN) {
        let w = weight(k, m);
        atomicAdd(&counts[own_bin], 1u);
        atomicAdd(&lows[own_bin], w & 0xffffu);
        atomicAdd(&highs[own_bin], w >> 16u);
    }
}

fn put(first: u32, own_bin: u32, k: u32) {
    if (own_bin < LAST_BIN) {
        keys[first + atomicAdd(&counts[own_bin], 1u)] = k;
    }
}

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>,
        @builtin(local_invocation_index) thread: u32) {
    let row = workgroup.z;
    let part = row * PARTS + workgroup.x;
    let inside = vec4<u32>(thread, thread + WORKGROUP, thread + 2u * WORKGROUP, thread + 3u * WORKGROUP);
    let id = workgroup.x * PART + inside;
    let near = min(id, vec4<u32>(V - 1u));
    let own = vec4<u32>(key(scaled(row, near.x)), key(scaled(row, near.y)), key(scaled(row, near.z)),
                        key(scaled(row, near.w)));
    let valid = (inside < vec4<u32>(PART)) & (id < vec4<u32>(V));
    atomicStore(&counts[thread], 0u);
    atomicStore(&lows[thread], 0u);
    atomicStore(&highs[thread], 0u);
    let m = value_of(greatest_key(thread, row));
    let narrows = (sampling[1] > 0u && sampling[1] < V) || bitcast<f32>(sampling[2]) < 1.0;
    if (!narrows) {
        let lowest = key(m + bitcast<f32>(sampling[3]));
        let kept = valid & (own >= vec4<u32>(lowest));
        let all = vec4<u32>(weight(own.x, m), weight(own.y, m), weight(own.z, m), weight(own.w, m));
        let w = select(vec4<u32>(), all, kept);
        let low = w & vec4<u32>(0xffffu);
        let high = w >> vec4<u32>(16u);
        let sum = halves(low.x + low.y + low.z + low.w, high.x + high.y + high.z + high.w);
        let before = sum_before(thread, sum);
        if (thread == WORKGROUP - 1u) {
            write_sum(part * 256u + LAST_BIN, add(before, sum));
        }
        return;
    }
    let binned = vec4<u32>(bin_of(own.x, m), bin_of(own.y, m), bin_of(own.z, m), bin_of(own.w, m));
    let bin = select(vec4<u32>(LAST_BIN), binned, valid);
    count(bin.x, own.x, m);
    count(bin.y, own.y, m);
    count(bin.z, own.z, m);
    count(bin.w, own.w, m);
    workgroupBarrier();
    var sum = halves(atomicLoad(&lows[thread]), atomicLoad(&highs[thread]));
    sum.z = atomicLoad(&counts[thread]);
    let before = sum_before(thread, sum);
    write_sum(part * 256u + thread, add(before, sum));
    // From here on, where the next key of the bin goes.
    atomicStore(&counts[thread], before.z);
    workgroupBarrier();
    put(part * PART, bin.x, own.x);
    put(part * PART, bin.y, own.y);
    put(part * PART, bin.z, own.z);
    put(part * PART, bin.w, own.w);
}
