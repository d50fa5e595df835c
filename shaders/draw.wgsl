// draw: draws the next token of each row by the sums of weigh.wgsl, whose l, m, w, bin and key these are; accept.wgsl
// does the bookkeeping. All sums that decide something are sums of integers, so the order in which threads arrive
// cannot change the draw.
//
//   1. top-k   keep l[i] >= the k-th largest l                                                          (0 keeps all)
//   2. top-p   keep the largest l until their w reach max(1, floor(W * P / 2^32)), P = u32(top_p * 2^32),
//              W = sum of kept w                                                                        (1 keeps all)
//   3. min-p   keep l[i] >= m + ln(min_p)
//   4. draw    W = sum of kept w, r = floor(W * u / 2^32); the first i whose running sum of kept w exceeds r
//   Ties are kept in 1 and 2. u = pcg(pcg(pcg(seed_lo) ^ seed_hi) + position + T - R + row + 1), by the new position.
//   picks[r, 0] = the key of m, which says whether the numbers are sound, and i; picks[r, 1 ..] = 0, 4294967295
//
// logits    f32 [R, V]                    read
// sampling  u32 [8]                       read   as in weigh.wgsl, then seed_lo, seed_hi
// ids       u32 [R]                       read
// seen      u32 [ceil(V/32)]              read   bit i % 32 of word i / 32
// picks     u32 [R, PARTS, 2]             read_write  key of the greatest penalized logit of a part, id
// bins      u32 [R, PARTS, 256, 2]        read   a sum: low 32 bits of the weight, number * 2^16 + its high bits
// keys      u32 [R, PARTS, PART]          read
//
// One workgroup of WORKGROUP = 256 a row (along z): a thread a part, a digit, or up to four logits of the chosen part;
// PART is at most 1024. 11.2 KiB of workgroup memory.

const INVALID: u32 = 0xffffffffu;
// key() of minus infinity and of infinity; finite numbers lie between, NaN above.
const LOWEST_KEY: u32 = 0x007fffffu;
const HIGHEST_KEY: u32 = 0xff800000u;
const ONE: f32 = 2147483648.0;
const BINS_A_NAT: f32 = 11.5;
const LAST_BIN: u32 = 255u;
// Keys of a bin that workgroup memory holds: two a thread.
const MEMBERS: u32 = 512u;

override WORKGROUP: u32 = 256;
override V: u32 = 1024;
override PART: u32 = 1024;
override PARTS: u32 = 1;

@group(0) @binding(1) var<uniform> step: vec4<u32>;
@group(0) @binding(2) var<storage, read> logits: array<f32>;
@group(0) @binding(3) var<storage, read> sampling: array<u32>;
@group(0) @binding(4) var<storage, read> ids: array<u32>;
@group(0) @binding(5) var<storage, read> seen: array<u32>;
@group(0) @binding(6) var<storage, read_write> picks: array<u32>;
@group(0) @binding(7) var<storage, read> bins: array<u32>;
@group(0) @binding(8) var<storage, read> keys: array<u32>;

var<workgroup> scratch: array<vec2<u32>, 256>;
var<workgroup> groups: array<vec2<u32>, 16>;
var<workgroup> member_keys: array<u32, 512>;
var<workgroup> member_weights: array<u32, 512>;
// Sums of the keys with a digit: of the low 11, the middle 11 and the high 10 bits of what they amount to.
var<workgroup> digits: array<atomic<u32>, 768>;
// First key and number of keys of parts in a bin.
var<workgroup> ranges: array<vec2<u32>, 256>;
var<workgroup> cursor: atomic<u32>;
var<workgroup> found_key: atomic<u32>;
var<workgroup> found: vec4<u32>;

fn was_seen(row: u32, i: u32) -> bool {
    var found_one = (seen[i >> 5u] & (1u << (i & 31u))) != 0u;
    for (var draft = 1u; draft <= row; draft++) {
        found_one = found_one || ids[draft] == i;
    }
    return found_one;
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
    // Below minus infinity there are no numbers.
    return select(min(u32(min((m - value_of(k)) * BINS_A_NAT, 255.0)), LAST_BIN), LAST_BIN, k <= LOWEST_KEY);
}

fn pcg(v: u32) -> u32 {
    let state = v * 747796405u + 2891336453u;
    let word = ((state >> ((state >> 28u) + 4u)) ^ state) * 277803737u;
    return (word >> 22u) ^ word;
}

// Numbers of 64 bits, low word first.
fn add(a: vec2<u32>, b: vec2<u32>) -> vec2<u32> {
    let low = a.x + b.x;
    return vec2<u32>(low, a.y + b.y + select(0u, 1u, low < a.x));
}

fn subtract(a: vec2<u32>, b: vec2<u32>) -> vec2<u32> {
    return vec2<u32>(a.x - b.x, a.y - b.y - select(0u, 1u, a.x < b.x));
}

fn at_least(a: vec2<u32>, b: vec2<u32>) -> bool {
    return a.y > b.y || (a.y == b.y && a.x >= b.x);
}

fn shifted(a: u32, bits: u32) -> vec2<u32> {
    return vec2<u32>(a << bits, a >> (32u - bits));
}

fn product(a: u32, b: u32) -> vec2<u32> {
    let al = a & 0xffffu;
    let ah = a >> 16u;
    let bl = b & 0xffffu;
    let bh = b >> 16u;
    let middle = ah * bl + ((al * bl) >> 16u);
    let other = al * bh + (middle & 0xffffu);
    return vec2<u32>(a * b, ah * bh + (middle >> 16u) + (other >> 16u));
}

// floor(a * b / 2^32)
fn share(a: vec2<u32>, b: u32) -> vec2<u32> {
    return add(product(a.y, b), vec2<u32>(product(a.x, b).y, 0u));
}

// The sum over the threads before this one.
fn sum_before(thread: u32, own: vec2<u32>) -> vec2<u32> {
    workgroupBarrier();
    scratch[thread] = own;
    workgroupBarrier();
    if (thread < 16u) {
        var sum = vec2<u32>();
        for (var i = 0u; i < 16u; i++) {
            sum = add(sum, scratch[thread * 16u + i]);
        }
        groups[thread] = sum;
    }
    workgroupBarrier();
    var before = vec2<u32>();
    // Loops of known length, for a compiler to unroll.
    for (var i = 0u; i < 16u; i++) {
        before = add(before, select(vec2<u32>(), groups[i], i < (thread >> 4u)));
    }
    for (var i = 0u; i < 16u; i++) {
        before = add(before, select(vec2<u32>(), scratch[(thread & 0xf0u) + i], i < (thread & 15u)));
    }
    return before;
}

// The sum over all threads; for sum_before() has written the groups.
fn sum_of_groups() -> vec2<u32> {
    var sum = vec2<u32>();
    for (var g = 0u; g < 16u; g++) {
        sum = add(sum, groups[g]);
    }
    return sum;
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
    return key(value_of(own) * bitcast<f32>(sampling[0]));
}

// Of a part, all bins up to one: its weight, or the number of its keys.
fn sum_at(row: u32, part: u32, bin: u32, weighs: bool) -> vec2<u32> {
    let at = 2u * ((row * PARTS + part) * 256u + bin);
    let word = bins[at + 1u];
    return select(vec2<u32>(word >> 16u, 0u), vec2<u32>(bins[at], word & 0xffffu), weighs);
}

// First key of a part in a bin, and how many there are.
fn range_of(row: u32, part: u32, bin: u32) -> vec2<u32> {
    let last = sum_at(row, part, bin, false).x;
    if (bin == 0u) {
        return vec2<u32>((row * PARTS + part) * PART, last);
    }
    let first = sum_at(row, part, bin - 1u, false).x;
    return vec2<u32>((row * PARTS + part) * PART + first, last - first);
}

// The same, or nothing beyond the last part: so that several are on their way at once.
fn sum_within(row: u32, part: u32, bin: u32, weighs: bool) -> vec2<u32> {
    return select(vec2<u32>(), sum_at(row, min(part, PARTS - 1u), bin, weighs), part < PARTS);
}

// In `groups`: over all parts, the sums up to each of 16 bins, stride apart.
fn sixteen_sums(thread: u32, row: u32, first: u32, stride: u32, weighs: bool) {
    let bin = first + (thread & 15u) * stride;
    var own = vec2<u32>();
    for (var part = thread >> 4u; part < PARTS; part += 128u) {
        let first_two = add(sum_within(row, part, bin, weighs), sum_within(row, part + 16u, bin, weighs));
        let next_two = add(sum_within(row, part + 32u, bin, weighs), sum_within(row, part + 48u, bin, weighs));
        let two_more = add(sum_within(row, part + 64u, bin, weighs), sum_within(row, part + 80u, bin, weighs));
        let last_two = add(sum_within(row, part + 96u, bin, weighs), sum_within(row, part + 112u, bin, weighs));
        own = add(own, add(add(first_two, next_two), add(two_more, last_two)));
    }
    workgroupBarrier();
    scratch[thread] = own;
    workgroupBarrier();
    if (thread < 16u) {
        var sum = vec2<u32>();
        for (var i = 0u; i < 16u; i++) {
            sum = add(sum, scratch[i * 16u + thread]);
        }
        groups[thread] = sum;
    }
    workgroupBarrier();
}

// How many of the sixteen sums do not reach `wanted`, and the greatest of those.
fn short_of(wanted: vec2<u32>) -> vec4<u32> {
    var number = 0u;
    var sum = vec2<u32>();
    for (var i = 0u; i < 16u; i++) {
        if (!at_least(groups[i], wanted)) {
            number = i + 1u;
            sum = groups[i];
        }
    }
    return vec4<u32>(sum, number, 0u);
}

// Keys of a range; the last one again beyond its end.
fn four_keys(range: vec2<u32>, i: u32) -> vec4<u32> {
    let at = range.x + min(vec4<u32>(i, i + 1u, i + 2u, i + 3u), vec4<u32>(range.y - 1u));
    return vec4<u32>(keys[at.x], keys[at.y], keys[at.z], keys[at.w]);
}

fn put_member(place: u32, fits: bool, k: u32, weighs: bool, m: f32) {
    if (fits) {
        member_keys[place] = k;
        member_weights[place] = select(1u, weight(k, m), weighs);
    }
}

// The largest key such that the keys from it up are `wanted`, or weigh as much; 0 where they never do.
fn select_key(thread: u32, row: u32, wanted: vec2<u32>, weighs: bool, m: f32) -> u32 {
    sixteen_sums(thread, row, 15u, 16u, weighs);
    let coarse = short_of(wanted);
    let first = 16u * min(coarse.z, 15u);
    sixteen_sums(thread, row, first, 1u, weighs);
    let fine = short_of(wanted);
    let bin = select(first + min(fine.z, 15u), LAST_BIN, coarse.z == 16u);
    let rest = subtract(wanted, select(coarse.xy, fine.xy, fine.z > 0u));
    // Keys are at least that of the least number, so these count nowhere.
    member_keys[thread] = 0u;
    member_keys[thread + WORKGROUP] = 0u;
    if (thread == 0u) {
        atomicStore(&cursor, 0u);
        atomicStore(&found_key, 0u);
        found = vec4<u32>(bin, rest, 0u);
    }
    let uniform_found = workgroupUniformLoad(&found);
    for (var part = thread; part < PARTS; part += WORKGROUP) {
        let range = range_of(row, part, uniform_found.x);
        if (range.y > 0u) {
            let place = atomicAdd(&cursor, range.y);
            let fitting = min(range.y, MEMBERS - min(place, MEMBERS));
            for (var i = 0u; i < fitting; i += 4u) {
                let k = four_keys(range, i);
                put_member(place + i, i < fitting, k.x, weighs, m);
                put_member(place + i + 1u, i + 1u < fitting, k.y, weighs, m);
                put_member(place + i + 2u, i + 2u < fitting, k.z, weighs, m);
                put_member(place + i + 3u, i + 3u < fitting, k.w, weighs, m);
            }
        }
    }
    workgroupBarrier();
    if (thread == 0u) {
        found.w = atomicLoad(&cursor);
    }
    let members = workgroupUniformLoad(&found).w;
    if (members > MEMBERS) {
        return select_digits(thread, row, uniform_found.x, uniform_found.yz, weighs, m);
    }
    rank_member(thread, members, uniform_found.yz);
    rank_member(thread + WORKGROUP, members, uniform_found.yz);
    workgroupBarrier();
    return atomicLoad(&found_key);
}

// What a member amounts to, low and high 16 bits, and 1; nothing if it is less than a key.
fn counted(i: u32, k: u32) -> vec3<u32> {
    let amount = member_weights[i];
    return select(vec3<u32>(), vec3<u32>(amount & 0xffffu, amount >> 16u, 1u), member_keys[i] >= k);
}

// Whether the members from this one up are enough. All of them are: so it does if exp() of weigh.wgsl was another.
fn rank_member(own: u32, members: u32, wanted: vec2<u32>) {
    if (own >= members) {
        return;
    }
    let k = member_keys[own];
    var sum = vec3<u32>();
    for (var i = 0u; i < members; i += 4u) {
        sum += counted(i, k) + counted(i + 1u, k) + counted(i + 2u, k) + counted(i + 3u, k);
    }
    if (sum.z == members || at_least(add(shifted(sum.y, 16u), vec2<u32>(sum.x, 0u)), wanted)) {
        atomicMax(&found_key, k);
    }
}

// The same for a bin of many keys: their digits of eight bits, one after the other.
fn select_digits(thread: u32, row: u32, bin: u32, wanted: vec2<u32>, weighs: bool, m: f32) -> u32 {
    var prefix = 0u;
    var rest = wanted;
    for (var level = 0u; level < 4u; level++) {
        let shift = 24u - 8u * level;
        atomicStore(&digits[thread], 0u);
        atomicStore(&digits[thread + 256u], 0u);
        atomicStore(&digits[thread + 512u], 0u);
        for (var first = 0u; first < PARTS; first += WORKGROUP) {
            workgroupBarrier();
            if (first + thread < PARTS) {
                ranges[thread] = range_of(row, first + thread, bin);
            }
            workgroupBarrier();
            for (var part = thread >> 5u; part < min(WORKGROUP, PARTS - first); part += WORKGROUP / 32u) {
                let range = ranges[part];
                for (var i = thread & 31u; i < range.y; i += 32u) {
                    let k = keys[range.x + i];
                    // A shift by 32 is not defined: two shifts of at most 24 and 8.
                    if ((k >> shift) >> 8u == prefix) {
                        add_digit((k >> shift) & 255u, select(1u, weight(k, m), weighs));
                    }
                }
            }
        }
        workgroupBarrier();
        // Mirrored, so that the sum of the threads before is that of the digits above.
        let digit = 255u - thread;
        let upper = shifted(atomicLoad(&digits[digit + 512u]), 22u);
        let middle = shifted(atomicLoad(&digits[digit + 256u]), 11u);
        let own = add(add(upper, middle), vec2<u32>(atomicLoad(&digits[digit]), 0u));
        let above = sum_before(thread, own);
        if (thread == 0u) {
            found = vec4<u32>(0u, 0u, 0u, 0u);
        }
        workgroupBarrier();
        // Where nothing is enough, for exp() of weigh.wgsl was another, the lowest digit that occurs.
        let all = sum_of_groups();
        let reached = at_least(add(above, own), rest) && !at_least(above, rest);
        let ends = !at_least(all, rest) && at_least(add(above, own), all) && !at_least(above, all);
        if (reached || ends) {
            found = vec4<u32>(digit, above, 0u);
        }
        let chosen = workgroupUniformLoad(&found);
        prefix = (prefix << 8u) | chosen.x;
        rest = subtract(rest, chosen.yz);
    }
    return prefix;
}

fn add_digit(digit: u32, amount: u32) {
    atomicAdd(&digits[digit], amount & 0x7ffu);
    if (amount > 0x7ffu) {
        atomicAdd(&digits[digit + 256u], (amount >> 11u) & 0x7ffu);
        atomicAdd(&digits[digit + 512u], amount >> 22u);
    }
}

// What the keys of a part from `lowest` up weigh, which lies in `bin`.
fn part_weight(row: u32, part: u32, bin: u32, lowest: u32, m: f32) -> vec2<u32> {
    if (bin == LAST_BIN) {
        return sum_at(row, part, bin, true);
    }
    var sum = vec2<u32>();
    if (bin > 0u) {
        sum = sum_at(row, part, bin - 1u, true);
    }
    let range = range_of(row, part, bin);
    for (var i = 0u; i < range.y; i += 4u) {
        let k = four_keys(range, i);
        let counts = (k >= vec4<u32>(lowest)) & (vec4<u32>(i, i + 1u, i + 2u, i + 3u) < vec4<u32>(range.y));
        let all = vec4<u32>(weight(k.x, m), weight(k.y, m), weight(k.z, m), weight(k.w, m));
        let w = select(vec4<u32>(), all, counts);
        sum = add(sum, add(vec2<u32>(w.x, 0u), vec2<u32>(w.y, 0u)));
        sum = add(sum, add(vec2<u32>(w.z, 0u), vec2<u32>(w.w, 0u)));
    }
    return sum;
}

// Of this thread's run of parts, so that the draw goes by index.
fn run_weight(thread: u32, row: u32, bin: u32, lowest: u32, m: f32) -> vec2<u32> {
    let run = (PARTS + WORKGROUP - 1u) / WORKGROUP;
    var sum = vec2<u32>();
    for (var part = thread * run; part < min((thread + 1u) * run, PARTS); part++) {
        sum = add(sum, part_weight(row, part, bin, lowest, m));
    }
    return sum;
}

// Leaves in `found` the part at which the running sum of kept weights exceeds r, and what of r is left.
fn find_part(thread: u32, row: u32, bin: u32, lowest: u32, m: f32, r: vec2<u32>) {
    let run = (PARTS + WORKGROUP - 1u) / WORKGROUP;
    var rest = r;
    var part = thread * run;
    // If it is none of the others, it is the last one.
    for (; part + 1u < min((thread + 1u) * run, PARTS); part++) {
        let own = part_weight(row, part, bin, lowest, m);
        if (!at_least(rest, own)) {
            break;
        }
        rest = subtract(rest, own);
    }
    found = vec4<u32>(part, rest, 0u);
}

fn kept_weight(row: u32, i: u32, end: u32, lowest: u32, m: f32) -> u32 {
    let k = key(scaled(row, min(i, V - 1u)));
    return select(0u, weight(k, m), i < end && k >= lowest);
}

// The first id of a part at which the running sum of kept weights exceeds r; its last kept one if none does, for exp()
// of weigh.wgsl was another. Thread by thread into `found_key`.
fn find_id(thread: u32, row: u32, part: u32, lowest: u32, m: f32, r: vec2<u32>) {
    let end = min((part + 1u) * PART, V);
    let id = part * PART + 4u * thread;
    let w = vec4<u32>(kept_weight(row, id, end, lowest, m), kept_weight(row, id + 1u, end, lowest, m),
                      kept_weight(row, id + 2u, end, lowest, m), kept_weight(row, id + 3u, end, lowest, m));
    let first = vec2<u32>(w.x, 0u);
    let second = add(first, vec2<u32>(w.y, 0u));
    let third = add(second, vec2<u32>(w.z, 0u));
    let own = add(third, vec2<u32>(w.w, 0u));
    let before = sum_before(thread, own);
    let all = sum_of_groups();
    let last = subtract(all, vec2<u32>(1u, 0u));
    let beyond = at_least(r, all);
    let point = vec2<u32>(select(r.x, last.x, beyond), select(r.y, last.y, beyond));
    if (at_least(point, before) && !at_least(point, add(before, own))) {
        let rest = subtract(point, before);
        let passed = select(0u, 1u, at_least(rest, first)) + select(0u, 1u, at_least(rest, second))
            + select(0u, 1u, at_least(rest, third));
        atomicStore(&found_key, id + passed);
    }
}

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>,
        @builtin(local_invocation_index) thread: u32) {
    let row = workgroup.z;
    let random = pcg(pcg(pcg(sampling[6]) ^ sampling[7]) + step.x + step.y - step.z + row + 1u);
    let top_k = sampling[1];
    let top_p = bitcast<f32>(sampling[2]);
    let cuts = top_k > 0u && top_k < V;

    let highest = greatest_key(thread, row);
    let m = value_of(highest);
    var lowest = 0u;
    if (cuts) {
        lowest = select_key(thread, row, vec2<u32>(top_k, 0u), false, m);
    }
    if (top_p < 1.0) {
        let own = run_weight(thread, row, bin_of(lowest, m), lowest, m);
        let before = sum_before(thread, own);
        // At most what the kept ones weigh, so that the sum is reached among them.
        let reached = share(sum_of_groups(), u32(top_p * 4294967296.0));
        let wanted = vec2<u32>(select(reached.x, max(reached.x, 1u), reached.y == 0u), reached.y);
        lowest = max(lowest, select_key(thread, row, wanted, true, m));
    }
    // By key, so that a tie with the threshold is decided as it is in the comparison of floats.
    lowest = max(lowest, key(m + bitcast<f32>(sampling[3])));
    var bin = LAST_BIN;
    if (cuts || top_p < 1.0) {
        bin = bin_of(lowest, m);
    }
    let own = run_weight(thread, row, bin, lowest, m);
    let before = sum_before(thread, own);
    let r = share(sum_of_groups(), random);
    if (thread == 0u) {
        found = vec4<u32>();
        atomicStore(&found_key, INVALID);
    }
    workgroupBarrier();
    if (at_least(r, before) && !at_least(r, add(before, own))) {
        find_part(thread, row, bin, lowest, m, subtract(r, before));
    }
    let chosen = workgroupUniformLoad(&found);
    find_id(thread, row, chosen.x, lowest, m, chosen.yz);
    workgroupBarrier();
    if (thread == 0u) {
        let sound = highest > LOWEST_KEY && highest < HIGHEST_KEY;
        picks[2u * row * PARTS] = highest;
        picks[2u * row * PARTS + 1u] = select(INVALID, atomicLoad(&found_key), sound);
    }
    for (var part = thread; part < PARTS; part += WORKGROUP) {
        if (part > 0u) {
            picks[2u * (row * PARTS + part)] = 0u;
            picks[2u * (row * PARTS + part) + 1u] = INVALID;
        }
    }
}
