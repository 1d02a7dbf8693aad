#include "layer/tail.h"

#include "device/launch.cuh"

namespace lamella {

int layer_tail_sm90(const LamellaLayerTail& p, void* workspace, int64_t zeroed, void* stream);

namespace {

constexpr int64_t kMaxRows = 8, kMaxHeld = 4096, kZeroed = 256;

}  // namespace
}  // namespace lamella

LAMELLA_API int64_t lamella_layer_tail_rows(int64_t a, int64_t h, int64_t i, int64_t q) {
  using namespace lamella;
  const auto fits = [](int64_t width) { return width > 0 && width % 512 == 0; };
  const bool served = fits(a) && a <= kMaxHeld && fits(h) && h <= kMaxHeld && fits(i) && i < (int64_t{1} << 24) &&
                      q % 16 == 0 && q < (int64_t{1} << 24);
  return served && device_facts().capability == 90 ? kMaxRows : 0;
}

LAMELLA_API int64_t lamella_layer_tail_workspace(int64_t i) { return lamella::kZeroed + lamella::kMaxRows * i * 2; }

LAMELLA_API int64_t lamella_layer_tail_zeroed(void) { return lamella::kZeroed; }

LAMELLA_API int lamella_layer_tail(const LamellaLayerTail* tail, void* workspace, int64_t workspace_bytes,
                                   void* stream) {
  using namespace lamella;
  if (tail->m == 0) return kOk;
  if (tail->m > lamella_layer_tail_rows(tail->a, tail->h, tail->i, tail->w_qkv != nullptr ? tail->q : 0))
    return kUnsupported;
  if (workspace_bytes < lamella_layer_tail_workspace(tail->i)) return kUnsupported;
  return layer_tail_sm90(*tail, workspace, kZeroed, stream);
}
