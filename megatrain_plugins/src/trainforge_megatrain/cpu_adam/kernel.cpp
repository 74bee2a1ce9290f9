// AdamW on host memory in one pass: gradient, clip scale, both moments and the master (whole or in halves) are read and
// written once, by the calling thread and a pool beside it. Plain C interface: `backends.py` calls it through ctypes, which
// lets Python's lock go meanwhile. Neither torch's headers nor the C++ library are needed, so it builds in half a second
// and loads beside any version of them.
//
// The arithmetic is written with vector extensions, because a plain loop over 16-bit halves is left scalar by some
// versions of GCC. Each element is computed by the same operations in the same order wherever it lies, so the bits do
// not depend on the number of threads, on the cut into chunks, or on the width of the vectors.

#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace {

#if defined(__AVX512F__) && defined(__AVX512BW__)
constexpr int kWidth = 16;
#elif defined(__AVX2__)
constexpr int kWidth = 8;
#else
constexpr int kWidth = 4;
#endif

typedef float Floats __attribute__((vector_size(kWidth * 4)));
typedef uint32_t Bits __attribute__((vector_size(kWidth * 4)));
typedef int32_t Signed __attribute__((vector_size(kWidth * 4)));
typedef uint16_t Halves __attribute__((vector_size(kWidth * 2)));
typedef int16_t SignedHalves __attribute__((vector_size(kWidth * 2)));

constexpr int64_t kGrain = 32768;  // elements that a thread takes at a time: 0.4 to 0.9 MB

inline Floats square_root(Floats x) {
#if defined(__AVX512F__) && defined(__AVX512BW__)
  return (Floats)_mm512_sqrt_ps((__m512)x);
#elif defined(__AVX2__)
  return (Floats)_mm256_sqrt_ps((__m256)x);
#elif defined(__x86_64__)
  return (Floats)_mm_sqrt_ps((__m128)x);
#elif defined(__aarch64__)
  return (Floats)vsqrtq_f32((float32x4_t)x);
#else
  for (int i = 0; i < kWidth; ++i) x[i] = __builtin_sqrtf(x[i]);
  return x;
#endif
}

template <class Vector>
inline Vector load(const void* from) {
  Vector values;
  memcpy(&values, from, sizeof values);
  return values;
}

template <class Vector>
inline void store(void* to, Vector values) {
  memcpy(to, &values, sizeof values);
}

// How a number lies in memory. `read` and `write` move kWidth of them.
struct Fp32 {
  typedef float Item;
  static Floats read(const float* from) { return load<Floats>(from); }
  static void write(float* to, Floats values) { store(to, values); }
};

struct Bf16 {
  typedef uint16_t Item;
  static Floats read(const uint16_t* from) {
    return (Floats)(__builtin_convertvector(load<Halves>(from), Bits) << 16);
  }
  // To nearest, ties to even; a NaN stays one.
  static void write(uint16_t* to, Floats values) {
    Bits bits = (Bits)values;
    Bits rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    Bits is_nan = (Bits)(values != values);
    Bits kept = (is_nan & ((bits >> 16) | 0x40)) | (~is_nan & rounded);
    store(to, __builtin_convertvector(kept, Halves));
  }
};

struct WholeMaster {
  static constexpr bool kSplit = false;
  typedef float Item;
  static Floats read(const float* master, const int16_t*) { return load<Floats>(master); }
  static void write(float* master, int16_t*, Floats values) { store(master, values); }
};

// trainforge.toolbox.halves: bits = (high << 16) + low, with high = (bits + 0x8000) >> 16.
struct SplitMaster {
  static constexpr bool kSplit = true;
  typedef uint16_t Item;
  static Floats read(const uint16_t* high, const int16_t* low) {
    Bits upper = __builtin_convertvector(load<Halves>(high), Bits) << 16;
    Signed lower = __builtin_convertvector(load<SignedHalves>(low), Signed);
    return (Floats)(upper + (Bits)lower);
  }
  static void write(uint16_t* high, int16_t* low, Floats values) {
    Bits bits = (Bits)values;
    store(high, __builtin_convertvector((bits + 0x8000) >> 16, Halves));
    store(low, __builtin_convertvector(bits & 0xffff, Halves));
  }
};

}  // namespace

extern "C" {

// Mirrored by backends._Chunk.
struct Chunk {
  const void* grad;
  void* exp_avg;
  void* exp_avg_sq;
  void* master;  // fp32, or the upper halves
  int16_t* low;  // the lower halves, or null
  int64_t length;
  float shrink;   // 1 - lr * weight decay
  float rate;     // lr / (1 - beta1^t)
  float inverse;  // 1 / sqrt(1 - beta2^t)
  int32_t kind;   // 1: bf16 gradient, 2: split master, 4: bf16 moments; added up
  int64_t first;  // filled here: grains before this chunk
};

// Mirrored by backends._Factors.
struct Factors {
  float scale;  // what gradients are multiplied with
  float beta1;
  float rest1;  // 1 - beta1, rounded once
  float beta2;
  float rest2;
  float eps;
};

}  // extern "C"

namespace {

template <class Grad, class Master, class Moment>
inline void one_vector(const typename Grad::Item* grad, typename Master::Item* master, int16_t* low,
                       typename Moment::Item* exp_avg, typename Moment::Item* exp_avg_sq, const Chunk& chunk,
                       const Factors& factors) {
  Floats g = Grad::read(grad) * factors.scale;
  Floats m = Moment::read(exp_avg) * factors.beta1 + g * factors.rest1;
  Floats v = Moment::read(exp_avg_sq) * factors.beta2 + (g * factors.rest2) * g;
  Floats step = (m * chunk.rate) / (square_root(v) * chunk.inverse + factors.eps);
  Floats p = Master::read(master, low) * chunk.shrink - step;
  Moment::write(exp_avg, m);
  Moment::write(exp_avg_sq, v);
  Master::write(master, low, p);
}

template <class Grad, class Master, class Moment>
void update_range(const Chunk& chunk, const Factors& factors, int64_t begin, int64_t end) {
  typedef typename Grad::Item G;
  typedef typename Master::Item P;
  typedef typename Moment::Item M;
  const G* __restrict grad = (const G*)chunk.grad;
  P* __restrict master = (P*)chunk.master;
  M* __restrict exp_avg = (M*)chunk.exp_avg;
  M* __restrict exp_avg_sq = (M*)chunk.exp_avg_sq;
  int16_t* __restrict low = chunk.low;
  int64_t i = begin;
  for (; i + kWidth <= end; i += kWidth)
    one_vector<Grad, Master, Moment>(grad + i, master + i, Master::kSplit ? low + i : low, exp_avg + i,
                                     exp_avg_sq + i, chunk, factors);
  int64_t left = end - i;
  if (left == 0) return;
  // The last few elements go through a whole vector too, so that the compiler has no scalar form to choose.
  G g[kWidth] = {};
  P p[kWidth] = {};
  M m[kWidth] = {}, v[kWidth] = {};
  int16_t l[kWidth] = {};
  memcpy(g, grad + i, left * sizeof(G));
  memcpy(p, master + i, left * sizeof(P));
  memcpy(m, exp_avg + i, left * sizeof(M));
  memcpy(v, exp_avg_sq + i, left * sizeof(M));
  if (Master::kSplit) memcpy(l, low + i, left * sizeof(int16_t));
  one_vector<Grad, Master, Moment>(g, p, l, m, v, chunk, factors);
  memcpy(master + i, p, left * sizeof(P));
  memcpy(exp_avg + i, m, left * sizeof(M));
  memcpy(exp_avg_sq + i, v, left * sizeof(M));
  if (Master::kSplit) memcpy(low + i, l, left * sizeof(int16_t));
}

typedef void (*Range)(const Chunk&, const Factors&, int64_t, int64_t);
const Range kRanges[8] = {
    update_range<Fp32, WholeMaster, Fp32>, update_range<Bf16, WholeMaster, Fp32>,
    update_range<Fp32, SplitMaster, Fp32>, update_range<Bf16, SplitMaster, Fp32>,
    update_range<Fp32, WholeMaster, Bf16>, update_range<Bf16, WholeMaster, Bf16>,
    update_range<Fp32, SplitMaster, Bf16>, update_range<Bf16, SplitMaster, Bf16>,
};

struct Job {
  const Chunk* chunks;
  int64_t count;
  const Factors* factors;
  int64_t grains;
  int64_t next;  // the first grain that nobody has taken
};

const Chunk& chunk_of(const Job& job, int64_t grain) {
  int64_t below = 0, above = job.count;  // chunks[below].first <= grain < chunks[above].first
  while (above - below > 1) {
    int64_t middle = (below + above) / 2;
    (job.chunks[middle].first <= grain ? below : above) = middle;
  }
  return job.chunks[below];
}

void work(Job* job) {
  int64_t grain;
  while ((grain = __atomic_fetch_add(&job->next, 1, __ATOMIC_RELAXED)) < job->grains) {
    const Chunk& chunk = chunk_of(*job, grain);
    int64_t begin = (grain - chunk.first) * kGrain;
    int64_t end = begin + kGrain < chunk.length ? begin + kGrain : chunk.length;
    kRanges[chunk.kind](chunk, *job->factors, begin, end);
  }
}

}  // namespace

extern "C" {

struct Pool {
  pthread_mutex_t turn;   // held for a whole update: one at a time
  pthread_mutex_t guard;  // protects what follows
  pthread_cond_t begun, finished;
  pthread_t* threads;
  int count;  // threads beside the calling one
  int busy;
  uint64_t round;
  bool ending;
  Job* job;
};

static void* serve(void* argument) {
  Pool* pool = (Pool*)argument;
  uint64_t seen = 0;
  pthread_mutex_lock(&pool->guard);
  while (true) {
    while (pool->round == seen && !pool->ending) pthread_cond_wait(&pool->begun, &pool->guard);
    if (pool->ending) break;
    seen = pool->round;
    Job* job = pool->job;
    pthread_mutex_unlock(&pool->guard);
    work(job);
    pthread_mutex_lock(&pool->guard);
    if (--pool->busy == 0) pthread_cond_signal(&pool->finished);
  }
  pthread_mutex_unlock(&pool->guard);
  return nullptr;
}

// Ends the threads and frees the pool. No update may be in progress.
void pool_close(Pool* pool) {
  pthread_mutex_lock(&pool->guard);
  pool->ending = true;
  pthread_cond_broadcast(&pool->begun);
  pthread_mutex_unlock(&pool->guard);
  for (int i = 0; i < pool->count; ++i) pthread_join(pool->threads[i], nullptr);
  free(pool->threads);
  free(pool);
}

// Starts `threads - 1` threads: the one that calls `pool_update` is the last. Null when the system gives none.
Pool* pool_open(int threads) {
  Pool* pool = (Pool*)calloc(1, sizeof(Pool));
  if (!pool) return nullptr;
  pthread_mutex_init(&pool->turn, nullptr);
  pthread_mutex_init(&pool->guard, nullptr);
  pthread_cond_init(&pool->begun, nullptr);
  pthread_cond_init(&pool->finished, nullptr);
  pool->threads = (pthread_t*)calloc(threads, sizeof(pthread_t));
  while (pool->threads && pool->count < threads - 1) {
    if (pthread_create(&pool->threads[pool->count], nullptr, serve, pool) != 0) {
      pool_close(pool);
      return nullptr;
    }
    ++pool->count;
  }
  return pool;
}

// Updates all chunks and returns when that is done. Chunks must not overlap.
void pool_update(Pool* pool, Chunk* chunks, int64_t count, const Factors* factors) {
  Job job = {chunks, count, factors, 0, 0};
  for (int64_t i = 0; i < count; ++i) {
    chunks[i].first = job.grains;
    job.grains += (chunks[i].length + kGrain - 1) / kGrain;
  }
  if (job.grains <= 1 || pool->count == 0) {  // waking a thread costs more
    work(&job);
    return;
  }
  pthread_mutex_lock(&pool->turn);
  pthread_mutex_lock(&pool->guard);
  pool->job = &job;
  pool->busy = pool->count;
  ++pool->round;
  pthread_cond_broadcast(&pool->begun);
  pthread_mutex_unlock(&pool->guard);
  work(&job);
  pthread_mutex_lock(&pool->guard);
  while (pool->busy) pthread_cond_wait(&pool->finished, &pool->guard);
  pthread_mutex_unlock(&pool->guard);
  pthread_mutex_unlock(&pool->turn);
}

}  // extern "C"
