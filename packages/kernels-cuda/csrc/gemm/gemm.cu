#include "gemm/gemm.h"

#include "gemm/gemm_portable.cuh"
#include "gemm/gemm_sm90.h"
#include "gemm/wide_f8_sm90.h"

namespace lamella {
namespace {

template <class T, int kTokens>
int launch_portable(const LamellaGemm& g, void* stream) {
  const int64_t token_tiles = (g.m + kTokens - 1) / kTokens;
  if (token_tiles > 65535) return kUnsupported;
  Launch how;
  how.grid = dim3(static_cast<unsigned>((g.n + 15) / 16), static_cast<unsigned>(token_tiles));
  how.block = dim3(kPortableWarps * 32);
  how.stream = static_cast<cudaStream_t>(stream);
  const int status = g.act != kActNone ? launch(gemm_portable_kernel<T, kTokens, true>, how, g)
                                       : launch(gemm_portable_kernel<T, kTokens, false>, how, g);
  if (status != kOk || g.squares_out == nullptr) return status;
  how.grid = dim3(static_cast<unsigned>((g.n + kGemmRows - 1) / kGemmRows), static_cast<unsigned>(g.m));
  how.block = dim3(32);
  return launch(gemm_squares_kernel<T>, how, g);
}

template <class T>
int by_tokens(const LamellaGemm& g, void* stream) {
  if (g.m <= 8) return launch_portable<T, 8>(g, stream);
  return launch_portable<T, 32>(g, stream);
}

int portable(const LamellaGemm& g, void* stream) {
  const Elem in = static_cast<Elem>(g.elem), out = static_cast<Elem>(g.out_elem);
  if (g.m > 65535) return kUnsupported;
  if (in == Elem::bf16 && out == Elem::bf16) return by_tokens<bf16>(g, stream);
  if (in == Elem::f16 && out == Elem::f16) return by_tokens<f16>(g, stream);
  return kUnsupported;
}

}  // namespace
}  // namespace lamella

LAMELLA_API int64_t lamella_gemm_gate_row(int64_t n) { return n / 64 * 128 + n % 64; }

LAMELLA_API int64_t lamella_gemm_workspace(int64_t m) {
  const int64_t tokens = m <= 8 ? 8 : m <= 16 ? 16 : m <= 32 ? 32 : m <= 64 ? 64 : m <= 128 ? 128 : 256;
  return 1024 + int64_t{lamella::device_facts().num_sms} * (tokens / 2) * 256 * 4;
}

LAMELLA_API int lamella_gemm(const LamellaGemm* gemm, void* workspace, int64_t workspace_bytes, void* stream) {
  if (gemm->m == 0 || gemm->n == 0) return kOk;
  if (gemm->k == 0 || gemm->n % 8 != 0 || gemm->k % 8 != 0) return kUnsupported;
  if (gemm->act != kActNone && gemm->n % 64 != 0) return kUnsupported;
  if (lamella::device_facts().capability == 90 && gemm->portable == 0) {
    if (lamella::wide_f8_serves(*gemm)) return lamella::wide_f8_sm90(*gemm, stream);
    return lamella::gemm_sm90(*gemm, workspace, workspace_bytes, stream);
  }
  return lamella::portable(*gemm, stream);
}
