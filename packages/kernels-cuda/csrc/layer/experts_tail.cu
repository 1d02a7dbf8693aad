#include "layer/experts_tail.h"

#include "device/launch.cuh"
#include "layer/tail.h"

namespace lamella {

int experts_tail_sm90(const LamellaExpertsTail& p, void* workspace, int64_t zeroed, void* stream);

namespace {

constexpr int64_t kMaxRows = 8, kMaxHeld = 4096;

}  // namespace
}  // namespace lamella

LAMELLA_API int64_t lamella_experts_tail_rows(int64_t a, int64_t h, int64_t i, int64_t q, int64_t num_experts,
                                              int64_t top_k) {
  using namespace lamella;
  const auto fits = [](int64_t width) { return width > 0 && width % 256 == 0; };
  const bool served = fits(a) && a <= kMaxHeld && fits(h) && h <= kMaxHeld && fits(i) && q % 16 == 0 &&
                      q < (int64_t{1} << 24) && num_experts > 0 && num_experts % 16 == 0 && num_experts <= 256 &&
                      i * num_experts < (int64_t{1} << 28) && top_k >= 1 && top_k <= 8;
  return served && device_facts().capability == 90 ? kMaxRows : 0;
}

LAMELLA_API int64_t lamella_experts_tail_workspace(int64_t i, int64_t num_experts, int64_t top_k) {
  return lamella_layer_tail_zeroed() + lamella::kMaxRows * 2 * (num_experts + top_k * i);
}

LAMELLA_API int lamella_experts_tail(const LamellaExpertsTail* tail, void* workspace, int64_t workspace_bytes,
                                     void* stream) {
  using namespace lamella;
  if (tail->m == 0) return kOk;
  const int64_t q = tail->w_qkv != nullptr ? tail->q : 0;
  if (tail->m > lamella_experts_tail_rows(tail->a, tail->h, tail->i, q, tail->num_experts, tail->top_k))
    return kUnsupported;
  if (workspace_bytes < lamella_experts_tail_workspace(tail->i, tail->num_experts, tail->top_k)) return kUnsupported;
  return experts_tail_sm90(*tail, workspace, lamella_layer_tail_zeroed(), stream);
}
