// A short causal convolution, channel by channel: out_i = sum over c of w_c * t_{i-c}, within i's document.
//
// A group of heads in a row of the batch is one piece of work. Its gradient to the weights is left per row of the batch,
// for the caller to add up, so that the result depends on no thread count.
#include "parallel.h"
#include "span.h"

namespace headgate {

// Mirrored by a ctypes.Structure in short_native.py.
struct ShortCall {
    int64_t batch, groups, repeat, queries, keys, width, taps, threads;
    View t, out, d_out, d_t;
    float *weights, *d_weights;  // (taps,H,D), and (B,taps,H,D)
    const int64_t* documents;    // (B,Tk): which document each token belongs to; null for one document a row
};

namespace {

// How many taps reach a token of the document of the query at `position`.
int64_t reach(const ShortCall& call, int64_t b, int64_t position) {
    const int64_t most = std::min(call.taps, position + 1);
    if (!call.documents) return most;
    const int64_t* ids = call.documents + b * call.keys;
    int64_t taps = 1;
    while (taps < most && ids[position - taps] == ids[position]) ++taps;
    return taps;
}

template <int D>
void forward(const ShortCall& call, int64_t b, int64_t g) {
    const int64_t heads = call.groups * call.repeat, offset = call.keys - call.queries;
    for (int64_t h = g * call.repeat; h < (g + 1) * call.repeat; ++h)
        for (int64_t i = 0; i < call.queries; ++i) {
            vec sum[D / LANES] = {};
            const int64_t taps = reach(call, b, offset + i);
            for (int64_t c = 0; c < taps; ++c) {
                const float *w = call.weights + (c * heads + h) * D, *t = call.t.row(b, g, offset + i - c);
                for (int n = 0; n < D / LANES; ++n) sum[n] += load(w + n * LANES) * load(t + n * LANES);
            }
            float* out = call.out.row(b, h, i);
            for (int n = 0; n < D / LANES; ++n) store(out + n * LANES, sum[n]);
        }
}

template <int D>
void backward(const ShortCall& call, int64_t b, int64_t g) {
    const int64_t heads = call.groups * call.repeat, offset = call.keys - call.queries;
    for (int64_t j = 0; j < call.keys; ++j) std::fill_n(call.d_t.row(b, g, j), D, 0.0f);
    for (int64_t h = g * call.repeat; h < (g + 1) * call.repeat; ++h) {
        float* d_weights = call.d_weights + (b * call.taps * heads + h) * D;
        for (int64_t c = 0; c < call.taps; ++c) std::fill_n(d_weights + c * heads * D, D, 0.0f);
        for (int64_t i = 0; i < call.queries; ++i) {
            const float* d_out = call.d_out.row(b, h, i);
            const int64_t taps = reach(call, b, offset + i);
            for (int64_t c = 0; c < taps; ++c) {
                const float *w = call.weights + (c * heads + h) * D, *t = call.t.row(b, g, offset + i - c);
                float *d_w = d_weights + c * heads * D, *d_t = call.d_t.row(b, g, offset + i - c);
                for (int n = 0; n < D; n += LANES) {
                    const vec d = load(d_out + n);
                    store(d_w + n, load(d_w + n) + d * load(t + n));
                    store(d_t + n, load(d_t + n) + d * load(w + n));
                }
            }
        }
    }
}

}  // namespace
}  // namespace headgate

extern "C" __attribute__((visibility("default"))) void headgate_short_forward(const headgate::ShortCall* call) {
    headgate::for_width(call->width, [&](auto width) {
        headgate::parallel_for(call->batch * call->groups, int(call->threads), [&](int64_t item) {
            headgate::forward<width()>(*call, item / call->groups, item % call->groups);
        });
    });
}

extern "C" __attribute__((visibility("default"))) void headgate_short_backward(const headgate::ShortCall* call) {
    headgate::for_width(call->width, [&](auto width) {
        headgate::parallel_for(call->batch * call->groups, int(call->threads), [&](int64_t item) {
            headgate::backward<width()>(*call, item / call->groups, item % call->groups);
        });
    });
}
