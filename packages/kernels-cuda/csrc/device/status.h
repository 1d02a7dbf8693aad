// What every exported function returns: 0, a cudaError_t, or one of ours.
#pragma once

#if defined(_WIN32)
#define LAMELLA_API extern "C"
#else
#define LAMELLA_API extern "C" __attribute__((visibility("default")))
#endif

enum LamellaStatus {
  kOk = 0,
  kUnsupported = 10001,  // this shape, type or option has no kernel
  kNoKernelImage = 10002,  // built without code for this device
};

LAMELLA_API const char* lamella_cuda_status_text(int status);

// Number of devices, 0 without a driver; compute capability as major * 10 + minor, 0 if there is no such device.
LAMELLA_API int lamella_cuda_device_count(void);
LAMELLA_API int lamella_cuda_capability(int device);

// Makes a device current and returns the one that was; negative: a cudaError_t, negated.
LAMELLA_API int lamella_cuda_swap_device(int device);
