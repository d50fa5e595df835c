// attention_merge: joins the parts that rope_attention made of up to eight tokens.
//
//   chunks c = 0 .. (position + t) / 64, where WINDOW is not 0 from that of the first key that the token sees
//   m = max over c of m[c],  f[c] = exp(m[c] - m)
//   y[t, h, i] = sum over c of f[c] * part[c, i] / sum over c of f[c] * sum[c]
//
// parts  vec4<f32> [T, heads, CHUNKS, D/4 + 1]  read   m, sum in the last vec4
// y      vec4<f32> [T, heads, D/4]              write
//
// One workgroup a head (along x) and token (z). A thread takes a quad of dimensions of every (WORKGROUP / (D/4))-th
// chunk, of all where there are at most four: linear_fused.wgsl does the same. WORKGROUP is a multiple of 16, at least
// D/4, at most 256. The order of the sums depends on the position alone.

override WORKGROUP: u32 = 256;
override HEADS: u32 = 1;
override HEAD_DIM: u32 = 64;
override CHUNKS: u32 = 1;
override WINDOW: u32 = 0;

@group(0) @binding(1) var<uniform> step: vec4<u32>;
@group(0) @binding(2) var<storage, read> parts: array<vec4<f32>>;
@group(0) @binding(3) var<storage, read_write> y: array<vec4<f32>>;

var<workgroup> maxima: array<f32, WORKGROUP>;
var<workgroup> sums: array<vec4<f32>, WORKGROUP>;
var<workgroup> totals: array<f32, WORKGROUP>;

// The first of `keys` keys that the last of them sees.
fn first_key(keys: u32) -> u32 {
    if (WINDOW == 0u) {
        return 0u;
    }
    return keys - min(keys, WINDOW);
}

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>,
        @builtin(local_invocation_index) thread: u32) {
    let t = workgroup.z;
    let quads = HEAD_DIM / 4u;
    let row = t * HEADS + workgroup.x;
    let hidden = first_key(step.x + t + 1u) / 64u;
    let first = (row * CHUNKS + hidden) * (quads + 1u);
    let count = (step.x + t) / 64u + 1u - hidden;
    let shares = select(WORKGROUP / quads, 1u, count <= 4u);
    let share = thread / quads;
    let quad = thread % quads;

    var largest = -3.0e38;
    if (share < shares) {
        for (var c = thread; c < count; c += shares * quads) {
            largest = max(largest, parts[first + c * (quads + 1u) + quads].x);
        }
    }
    maxima[thread] = largest;
    workgroupBarrier();
    for (var i = 0u; i < min(WORKGROUP, count); i++) {
        largest = max(largest, maxima[i]);
    }

    var sum = vec4<f32>(0.0);
    var total = 0.0;
    if (share < shares) {
        for (var c = share; c < count; c += shares) {
            let at = first + c * (quads + 1u);
            let last = parts[at + quads];
            let f = exp(last.x - largest);
            sum = fma(vec4<f32>(f), parts[at + quad], sum);
            total = fma(f, last.y, total);
        }
    }
    sums[thread] = sum;
    totals[thread] = total;
    workgroupBarrier();
    if (thread < quads) {
        for (var i = 1u; i < min(shares, count); i++) {
            sum += sums[i * quads + thread];
            total += totals[i * quads + thread];
        }
        y[row * quads + thread] = sum / total;
    }
}
