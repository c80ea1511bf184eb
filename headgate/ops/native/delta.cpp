// The gated delta rule in chunks: S_t = alpha_t S_{t-1} (I - beta_t k_t k_t^T) + beta_t v_t k_t^T, out_t = S_t q_t.
//
// Inside a chunk, with G the running sum of log alpha, E_ij = exp(G_i - G_j) and S0 the memory before it:
//   written_i = R_i + sum over j < i of A_ij written_j,  R_i = beta_i (v_i - exp(G_i) k_i S0),
//                                                        A_ij = -beta_i (k_i . k_j) E_ij
//   out_i = exp(G_i) q_i S0 + sum over j <= i of P_ij written_j,  P_ij = (q_i . k_j) E_ij
//   S1 = exp(G_last) S0 + sum over j of exp(G_last - G_j) k_j written_j^T
// The memory lies as keys by values. The backward pass goes from the last chunk to the first, with the memory
// before each as the forward pass left it, and computes the rest of a chunk again. A head is one piece of work.
#include "parallel.h"
#include "span.h"

#include <cmath>

namespace headgate {

// Mirrored by a ctypes.Structure in delta_native.py.
struct DeltaCall {
    int64_t batch, heads, tokens, width, threads;
    View q, k, v, out, d_out, d_q, d_k, d_v;
    // Contiguous: (B,H,T) each, then the memory before the first token and after the last (B,H,D,D), and that
    // before every chunk (B,H,chunks,D,D), null where no backward pass follows.
    float *log_decay, *beta, *d_log_decay, *d_beta;
    float *memory, *after, *states, *d_memory, *d_after;
};

namespace {

constexpr int SIZE = BLOCK;  // tokens of a chunk

// c (+)= a b: `rows` rows, a multiple of ROWS, of COLUMNS floats; a(i,k) = a[i * A_ROW + k * A_STEP].
template <int A_ROW, int A_STEP, int COLUMNS, bool ADD>
void multiply(const float* a, const float* b, float* c, int rows, int steps) {
    for_panels<COLUMNS>(COLUMNS, [&](int j, auto n) {
        for (int i = 0; i < rows; i += ROWS)
            product<n(), A_ROW, A_STEP, COLUMNS, ADD>(a + i * A_ROW, b + j, c + i * COLUMNS + j, COLUMNS, steps);
    });
}

// The same for a matrix a of SIZE x SIZE that is 0 above its diagonal, or of which the transpose is meant.
template <int COLUMNS>
void add_lower(const float* a, const float* b, float* c) {
    for_panels<COLUMNS>(COLUMNS, [&](int j, auto n) {
        for (int i = 0; i < SIZE; i += ROWS)
            product<n(), SIZE, 1, COLUMNS, true>(a + i * SIZE, b + j, c + i * COLUMNS + j, COLUMNS, i + ROWS);
    });
}
template <int COLUMNS>
void add_lower_transposed(const float* a, const float* b, float* c) {
    for_panels<COLUMNS>(COLUMNS, [&](int j, auto n) {
        for (int i = 0; i < SIZE; i += ROWS)
            product<n(), 1, SIZE, COLUMNS, true>(a + i * SIZE + i, b + i * COLUMNS + j, c + i * COLUMNS + j, COLUMNS,
                                                 SIZE - i);
    });
}

template <int D>
float dot(const float* a, const float* b) {
    vec total{};
    for (int d = 0; d < D; d += LANES) total += load(a + d) * load(b + d);
    return sum(total);
}

// to (+)= from * factor
template <int D, bool ADD>
void scale(const float* from, float factor, float* to) {
    for (int d = 0; d < D; d += LANES) {
        const vec scaled = load(from + d) * factor;
        store(to + d, ADD ? load(to + d) + scaled : scaled);
    }
}

float exponential(float x) { return exp2(broadcast(x * LOG2E))[0]; }

template <int D>
struct Delta {
    static constexpr int ROW = SIZE * D, PAIRS = SIZE * SIZE, MEMORY = (D + ROWS) * D;
    const DeltaCall& call;
    const int64_t b, h;
    float *q, *k, *v, *lanes, *found, *written, *spare;  // SIZE x D
    float *products, *a, *p;                             // SIZE x SIZE
    float* memory;                                       // D x D, and rows that tiles reach into
    float beta[SIZE], since[SIZE], from_start[SIZE], to_end[SIZE];

    static size_t floats() { return 7 * (ROW + LANES) + 3 * PAIRS + MEMORY + 16 * 11; }

    Delta(const DeltaCall& c, int64_t batch, int64_t head, Pieces& pieces) : call(c), b(batch), h(head) {
        for (float** to : {&q, &k, &v, &lanes, &found, &written, &spare}) {
            *to = pieces.take(ROW + LANES);  // tiles of D rows read a little beyond
            std::fill(*to + ROW, *to + ROW + LANES, 0.0f);
        }
        products = pieces.take(PAIRS), a = pieces.take(PAIRS), p = pieces.take(PAIRS);
        memory = pieces.take(MEMORY);
        std::fill(memory, memory + MEMORY, 0.0f);
    }

    int64_t head() const { return b * call.heads + h; }
    int64_t chunks() const { return (call.tokens + SIZE - 1) / SIZE; }
    int count(int64_t chunk) const { return int(std::min<int64_t>(SIZE, call.tokens - chunk * SIZE)); }
    float* state(int64_t chunk) const { return call.states + (head() * chunks() + chunk) * D * D; }

    void rows(const View& view, int64_t chunk, float* to) const {
        const int n = count(chunk);
        for (int i = 0; i < n; ++i) scale<D, false>(view.row(b, h, chunk * SIZE + i), 1.0f, to + i * D);
        std::fill(to + n * D, to + ROW, 0.0f);
    }

    // What the chunk's tokens write, from the memory before it; and P.
    void solve(int64_t chunk) {
        rows(call.q, chunk, q), rows(call.k, chunk, k), rows(call.v, chunk, v);
        const int64_t at = head() * call.tokens + chunk * SIZE;
        double running = 0;
        for (int i = 0; i < SIZE; ++i) {  // tokens beyond the last write nothing and let nothing fade
            const bool real = i < count(chunk);
            running += real ? call.log_decay[at + i] : 0.0f;
            beta[i] = real ? call.beta[at + i] : 0.0f, since[i] = float(running);
        }
        for (int i = 0; i < SIZE; ++i)
            from_start[i] = exponential(since[i]), to_end[i] = exponential(since[SIZE - 1] - since[i]);
        transpose<D, SIZE>(k, lanes, SIZE);
        multiply<D, 1, SIZE, false>(k, lanes, products, SIZE, D);
        multiply<D, 1, SIZE, false>(q, lanes, p, SIZE, D);
        each_pair([&](int i, int at, vec decay, ivec before, ivec up_to) {
            const vec nothing{};
            store(p + at, select(up_to, load(p + at) * decay, nothing));
            store(products + at, select(before, load(products + at) * -decay, nothing));
            store(a + at, load(products + at) * beta[i]);
        });
        multiply<D, 1, D, false>(k, memory, found, SIZE, D);
        for (int i = 0; i < SIZE; ++i) {
            scale<D, false>(v + i * D, beta[i], written + i * D);
            scale<D, true>(found + i * D, -beta[i] * from_start[i], written + i * D);
        }
        for (int i = 0; i < SIZE; i += ROWS) {
            if (i)
                for_panels<D>(D, [&](int d, auto n) {
                    product<n(), SIZE, 1, D, true>(a + i * SIZE, written + d, written + i * D + d, D, i);
                });
            for (int r = i + 1; r < i + ROWS; ++r)
                for (int s = i; s < r; ++s) scale<D, true>(written + s * D, a[r * SIZE + s], written + r * D);
        }
    }

    // work(i, place, E_ij, j < i, j <= i) for LANES pairs at a time.
    template <class Work>
    void each_pair(const Work& work) const {
        ivec lane;
        for (int j = 0; j < LANES; ++j) lane[j] = j;
        for (int i = 0; i < SIZE; ++i)
            for (int j = 0; j < SIZE; j += LANES) {
                const ivec key = lane + j, query = broadcast(int32_t(i));
                const vec decay = exp2((since[i] - load(since + j)) * LOG2E);
                work(i, i * SIZE + j, decay, (ivec)(key < query), (ivec)(key <= query));
            }
    }

    void advance() {
        const float kept = from_start[SIZE - 1];
        for (int i = 0; i < D; ++i) scale<D, false>(memory + i * D, kept, memory + i * D);
        for (int i = 0; i < SIZE; ++i) scale<D, false>(k + i * D, to_end[i], spare + i * D);
        multiply<1, D, D, true>(spare, written, memory, up_to_rows(D), SIZE);
    }

    void forward() {
        std::copy(call.memory + head() * D * D, call.memory + (head() + 1) * D * D, memory);
        for (int64_t chunk = 0; chunk < chunks(); ++chunk) {
            if (call.states) std::copy(memory, memory + D * D, state(chunk));
            solve(chunk);
            for (int i = 0; i < SIZE; ++i) scale<D, false>(q + i * D, from_start[i], q + i * D);
            multiply<D, 1, D, false>(q, memory, spare, SIZE, D);
            add_lower<D>(p, written, spare);
            for (int i = 0; i < count(chunk); ++i)
                scale<D, false>(spare + i * D, 1.0f, call.out.row(b, h, chunk * SIZE + i));
            advance();
        }
        std::copy(memory, memory + D * D, call.after + head() * D * D);
    }

    // Token by token, where there are too few for a chunk.
    void by_token() {
        std::copy(call.memory + head() * D * D, call.memory + (head() + 1) * D * D, memory);
        for (int64_t t = 0; t < call.tokens; ++t) {
            const int64_t at = head() * call.tokens + t;
            const float alpha = exponential(call.log_decay[at]);
            const float *of_k = call.k.row(b, h, t), *of_q = call.q.row(b, h, t);
            scale<D, false>(call.v.row(b, h, t), call.beta[at], written);
            for (int i = 0; i < D; ++i) scale<D, false>(memory + i * D, alpha, memory + i * D);
            for (int i = 0; i < D; ++i) scale<D, true>(memory + i * D, -call.beta[at] * of_k[i], written);
            std::fill(spare, spare + D, 0.0f);
            for (int i = 0; i < D; ++i) {
                scale<D, true>(written, of_k[i], memory + i * D);
                scale<D, true>(memory + i * D, of_q[i], spare);
            }
            scale<D, false>(spare, 1.0f, call.out.row(b, h, t));
        }
        std::copy(memory, memory + D * D, call.after + head() * D * D);
    }
};

template <int D>
struct Gradient : Delta<D> {
    using Base = Delta<D>;
    using Base::a, Base::b, Base::beta, Base::call, Base::found, Base::from_start, Base::h, Base::k, Base::lanes,
        Base::memory, Base::p, Base::products, Base::q, Base::spare, Base::to_end, Base::v, Base::written;
    float *d_out, *d_written, *d_q, *d_k;  // SIZE x D
    float *d_a, *d_p;                      // SIZE x SIZE
    float *d_memory, *turned;              // D x D
    float d_since[SIZE], d_beta[SIZE];

    static size_t floats() {
        return Base::floats() + 4 * (Base::ROW + LANES) + 2 * Base::PAIRS + 2 * Base::MEMORY + 16 * 8;
    }

    Gradient(const DeltaCall& c, int64_t batch, int64_t head, Pieces& pieces) : Base(c, batch, head, pieces) {
        for (float** to : {&d_out, &d_written, &d_q, &d_k}) *to = pieces.take(Base::ROW + LANES);
        d_a = pieces.take(Base::PAIRS), d_p = pieces.take(Base::PAIRS);
        d_memory = pieces.take(Base::MEMORY), turned = pieces.take(Base::MEMORY);
        std::fill(d_memory, d_memory + Base::MEMORY, 0.0f);
    }

    void run() {
        const int64_t at = this->head() * D * D;
        if (call.d_after) std::copy(call.d_after + at, call.d_after + at + D * D, d_memory);
        for (int64_t n = this->chunks() - 1; n >= 0; --n) chunk(n);
        std::copy(d_memory, d_memory + D * D, call.d_memory + at);
    }

    void chunk(int64_t n) {
        std::copy(this->state(n), this->state(n) + D * D, memory);
        this->solve(n);
        this->rows(call.d_out, n, d_out);
        std::fill(d_since, d_since + SIZE, 0.0f);
        of_written();
        // (I - A)^T d_r = d_written; d_r takes its place.
        for (int j = SIZE - ROWS; j >= 0; j -= ROWS) {
            const int after = j + ROWS;
            if (after < SIZE)
                for_panels<D>(D, [&](int d, auto w) {
                    product<w(), 1, SIZE, D, true>(a + after * SIZE + j, d_written + after * D + d,
                                                   d_written + j * D + d, D, SIZE - after);
                });
            for (int r = after - 2; r >= j; --r)
                for (int s = r + 1; s < after; ++s)
                    scale<D, true>(d_written + s * D, a[s * SIZE + r], d_written + r * D);
        }
        transpose<D, SIZE>(written, lanes, SIZE);
        multiply<D, 1, SIZE, false>(d_written, lanes, d_a, SIZE, D);
        multiply<D, 1, SIZE, false>(d_out, lanes, d_p, SIZE, D);
        of_pairs();
        of_rows(n);
        of_memory();
        // d_written is that of R; the running sums' gradients become those of their terms.
        const int64_t at = this->head() * call.tokens + n * SIZE;
        float rest = 0;
        for (int i = SIZE - 1; i >= 0; --i) {
            rest += d_since[i];
            if (i >= this->count(n)) continue;
            const int64_t t = n * SIZE + i;
            call.d_log_decay[at + i] = rest, call.d_beta[at + i] = d_beta[i];
            scale<D, false>(d_q + i * D, 1.0f, call.d_q.row(b, h, t));
            scale<D, false>(d_k + i * D, 1.0f, call.d_k.row(b, h, t));
            scale<D, false>(d_written + i * D, beta[i], call.d_v.row(b, h, t));
        }
    }

    // By the memory after the chunk and by its own outputs.
    void of_written() {
        multiply<D, 1, D, false>(k, d_memory, d_written, SIZE, D);
        for (int j = 0; j < SIZE; ++j) {
            scale<D, false>(d_written + j * D, to_end[j], d_written + j * D);
            const float share = dot<D>(d_written + j * D, written + j * D);
            d_since[SIZE - 1] += share, d_since[j] -= share;
        }
        add_lower_transposed<D>(p, d_out, d_written);
    }

    // d_a and d_p become the gradients of k_i . k_j and q_i . k_j.
    void of_pairs() {
        vec columns[SIZE / LANES] = {}, row{}, of_beta{};
        int last = 0;
        auto close = [&] {
            d_since[last] += sum(row), d_beta[last] = sum(of_beta);
            row = of_beta = vec{};
        };
        this->each_pair([&](int i, int at, vec decay, ivec before, ivec up_to) {
            if (i != last) close(), last = i;
            const vec nothing{}, of_a = select(before, load(d_a + at), nothing);
            const vec of_p = select(up_to, load(d_p + at), nothing);
            const vec both = of_a * load(a + at) + of_p * load(p + at);
            row += both, columns[at % SIZE / LANES] += both, of_beta += of_a * load(products + at);
            store(d_a + at, select(before, of_a * (-beta[i] * decay), nothing));
            store(d_p + at, select(up_to, of_p * decay, nothing));
        });
        close();
        for (int j = 0; j < SIZE; ++j) d_since[j] -= columns[j / LANES][j % LANES];
    }

    void of_rows(int64_t) {
        transpose<D, D>(memory, turned, D);
        multiply<D, 1, D, false>(d_out, turned, d_q, SIZE, D);
        for (int i = 0; i < SIZE; ++i) {
            scale<D, false>(d_q + i * D, from_start[i], d_q + i * D);
            d_since[i] += dot<D>(d_q + i * D, q + i * D);
        }
        add_lower<D>(d_p, k, d_q);
        for (int i = 0; i < SIZE; ++i) {
            const float* d_r = d_written + i * D;
            const float of_found = dot<D>(d_r, found + i * D) * from_start[i];
            d_beta[i] += dot<D>(d_r, v + i * D) - of_found;
            d_since[i] -= beta[i] * of_found;
            scale<D, false>(d_r, -beta[i] * from_start[i], found + i * D);  // the gradient of k_i S0
        }
        multiply<D, 1, D, false>(found, turned, d_k, SIZE, D);
        transpose<D, D>(d_memory, turned, D);
        for (int i = 0; i < SIZE; ++i) scale<D, false>(written + i * D, to_end[i], spare + i * D);
        multiply<D, 1, D, true>(spare, turned, d_k, SIZE, D);
        add_lower_transposed<D>(d_p, q, d_k);
        add_lower_transposed<D>(d_a, k, d_k);
        add_lower<D>(d_a, k, d_k);
    }

    // From that after the chunk to that before it.
    void of_memory() {
        const float kept = from_start[SIZE - 1];
        float share = 0;
        for (int i = 0; i < D; ++i) {
            share += dot<D>(d_memory + i * D, memory + i * D);
            scale<D, false>(d_memory + i * D, kept, d_memory + i * D);
        }
        d_since[SIZE - 1] += kept * share;
        for (int i = 0; i < SIZE; ++i) scale<D, false>(q + i * D, from_start[i], spare + i * D);
        multiply<1, D, D, true>(spare, d_out, d_memory, up_to_rows(D), SIZE);
        multiply<1, D, D, true>(k, found, d_memory, up_to_rows(D), SIZE);
    }
};

template <template <int> class Kernel, class Work>
void each_head(const DeltaCall& call, const Work& work) {
    for_width(call.width, [&](auto width) {
        using Of = Kernel<width()>;
        parallel_for(call.batch * call.heads, int(call.threads), [&](int64_t item) {
            Pieces pieces(Scratch::of_thread().floats(Of::floats()));
            Of kernel(call, item / call.heads, item % call.heads, pieces);
            work(kernel);
        });
    });
}

}  // namespace
}  // namespace headgate

extern "C" __attribute__((visibility("default"))) void headgate_delta_forward(const headgate::DeltaCall* call) {
    headgate::each_head<headgate::Delta>(*call, [&](auto& kernel) {
        if (call->tokens <= headgate::FEW && !call->states)
            kernel.by_token();
        else
            kernel.forward();
    });
}

extern "C" __attribute__((visibility("default"))) void headgate_delta_backward(const headgate::DeltaCall* call) {
    headgate::each_head<headgate::Gradient>(*call, [&](auto& kernel) { kernel.run(); });
}
