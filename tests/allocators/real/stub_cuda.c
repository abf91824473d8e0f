/* A CUDA runtime and driver without a device: PyTorch's caching allocator runs on it and gets addresses, no memory.
 *
 * cudaMalloc and cuMemCreate count bytes against STUB_CAPACITY; addresses only grow, 2 MiB apart at least. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <driver_types.h>
#include <stdlib.h>
#include <string.h>

#define BASE 0x7f0000000000UL
#define MIB2 0x200000UL
#define MANY 65536
#define OUT_OF_MEMORY 2 /* cudaErrorMemoryAllocation, CUDA_ERROR_OUT_OF_MEMORY */

static unsigned long offset, used, sizes[MANY], addresses[MANY];
static int count;

static unsigned long number(const char *name, unsigned long otherwise) {
  const char *text = getenv(name);
  return text ? strtoul(text, 0, 10) : otherwise;
}
static unsigned long total(void) { return number("STUB_TOTAL", 1UL << 40); }
static unsigned long capacity(void) { return number("STUB_CAPACITY", total()); }
static unsigned long place(unsigned long size) {
  unsigned long found = BASE + offset;
  offset += (size + MIB2 - 1) / MIB2 * MIB2;
  return found;
}

/* runtime: memory */
int cudaMalloc(void **p, size_t size) {
  if (used + size > capacity() || count == MANY) return OUT_OF_MEMORY;
  used += size;
  addresses[count] = place(size);
  sizes[count] = size;
  *p = (void *)addresses[count++];
  return 0;
}
int cudaFree(void *p) {
  for (int i = 0; i < count; i++)
    if (addresses[i] == (unsigned long)p) {
      used -= sizes[i];
      sizes[i] = 0;
    }
  return 0;
}
int cudaMemGetInfo(size_t *f, size_t *t) {
  *f = capacity() - used;
  *t = total();
  return 0;
}
int cudaGetDeviceProperties(struct cudaDeviceProp *p, int d) {
  memset(p, 0, sizeof *p);
  strcpy(p->name, "stub");
  p->totalGlobalMem = total();
  p->major = 9;
  p->multiProcessorCount = 132;
  p->warpSize = 32;
  p->maxThreadsPerMultiProcessor = 2048;
  p->maxThreadsPerBlock = 1024;
  p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
  p->maxThreadsDim[2] = 64;
  p->maxGridSize[0] = 0x7fffffff;
  p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->sharedMemPerBlock = 49152;
  p->sharedMemPerBlockOptin = 232448;
  p->sharedMemPerMultiprocessor = 233472;
  p->regsPerBlock = p->regsPerMultiprocessor = 65536;
  p->l2CacheSize = 62914560;
  return 0;
}

/* driver: virtual memory, for expandable segments */
int cuMemAddressReserve(unsigned long *p, size_t size, size_t a, unsigned long b, unsigned long c) {
  *p = place(size + MIB2);
  return 0;
}
int cuMemAddressFree(unsigned long p, size_t size) { return 0; }
int cuMemCreate(unsigned long *handle, size_t size, const void *prop, unsigned long flags) {
  if (used + size > capacity()) return OUT_OF_MEMORY;
  used += size;
  *handle = size; /* all that a release has to know */
  return 0;
}
int cuMemRelease(unsigned long handle) {
  used -= handle;
  return 0;
}
int cuMemMap(unsigned long p, size_t size, size_t o, unsigned long h, unsigned long f) { return 0; }
int cuMemUnmap(unsigned long p, size_t size) { return 0; }
int cuMemSetAccess(unsigned long p, size_t size, const void *d, size_t n) { return 0; }
int cuGetErrorString(int e, const char **s) { *s = "stub"; return 0; }
int cuDeviceGetAttribute(int *v, int a, int d) { *v = 0; return 0; }
int cuInit(unsigned f) { return 0; }
int cuDriverGetVersion(int *v) { *v = 13020; return 0; }
int cuDevicePrimaryCtxGetState(int d, unsigned *f, int *a) { *f = 0; *a = 1; return 0; }
static int succeed(void) { return 0; } /* for driver functions that are looked up and not called */
int cudaGetDriverEntryPointByVersion(const char *name, void **f, unsigned v, unsigned long flags, int *status) {
  *f = dlsym(RTLD_DEFAULT, name);
  if (!*f) *f = (void *)succeed;
  if (status) *status = 0;
  return 0;
}

/* runtime: the rest of what starting PyTorch asks */
int cudaGetDeviceCount(int *n) { *n = 1; return 0; }
int cudaGetDevice(int *d) { *d = 0; return 0; }
int cudaSetDevice(int d) { return 0; }
int cudaGetLastError(void) { return 0; }
int cudaPeekAtLastError(void) { return 0; }

/* CUDA graphs: a stream is captured from begin to end, and what is captured is nothing */
static void *captured;
static int capturing;
static unsigned long long capture;
int cudaStreamBeginCapture(void *s, int mode) { captured = s; capturing = 1; capture++; return 0; }
int cudaStreamEndCapture(void *s, void **graph) { capturing = 0; *graph = malloc(8); return 0; }
int cudaStreamIsCapturing(void *s, int *st) { *st = capturing && s == captured; return 0; }
int cudaStreamGetCaptureInfo(void *s, int *st, unsigned long long *id, void **graph, void **d, void **e, size_t *n) {
  *st = capturing && s == captured;
  if (*st && id) *id = capture;
  if (*st && graph) *graph = (void *)1;
  if (*st && n) *n = 0;
  return 0;
}
int cudaGraphInstantiate(void **run, void *graph, unsigned long long f) { *run = malloc(8); return 0; }
int cudaGraphInstantiateWithFlags(void **run, void *graph, unsigned long long f) { *run = malloc(8); return 0; }
int cudaGraphLaunch(void *run, void *s) { return 0; }
int cudaGraphDestroy(void *graph) { return 0; }
int cudaGraphExecDestroy(void *run) { return 0; }
int cudaGraphGetNodes(void *graph, void *nodes, size_t *n) { *n = 1; return 0; }
int cudaGraphRetainUserObject(void *graph, void *object, unsigned n, unsigned f) { return 0; }

int cudaDeviceGetStreamPriorityRange(int *l, int *g) { *l = 0; *g = -5; return 0; }
int cudaStreamCreateWithPriority(void **s, unsigned f, int p) {
  static unsigned long streams;
  *s = (void *)++streams;
  return 0;
}
int cudaStreamSynchronize(void *s) { return 0; }
int cudaDeviceSynchronize(void) { return 0; }
int cudaStreamQuery(void *s) { return 0; }
int cudaEventCreateWithFlags(void **e, unsigned f) { *e = malloc(8); return 0; }
int cudaEventRecord(void *e, void *s) { return 0; }
int cudaEventRecordWithFlags(void *e, void *s, unsigned f) { return 0; }
int cudaEventSynchronize(void *e) { return 0; }
int cudaStreamWaitEvent(void *s, void *e, unsigned f) { return 0; }
int cudaEventQuery(void *e) { return 0; }
int cudaEventDestroy(void *e) { return 0; }
int cudaDriverGetVersion(int *v) { *v = 13020; return 0; }

/* NVML, which expandable segments ask whether memory can be shared between machines: it cannot. The same library is
 * linked as libnvidia-ml.so.1. */
int nvmlInit_v2(void) { return 0; }
int nvmlShutdown(void) { return 0; }
int nvmlDeviceGetHandleByPciBusId_v2(const char *id, void **device) { *device = (void *)1; return 0; }
int nvmlDeviceGetNvLinkRemoteDeviceType(void *d, unsigned l, int *t) { return 3; }
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void *d, unsigned l, void *p) { return 3; /* NVML_ERROR_NOT_SUPPORTED */ }
int nvmlDeviceGetComputeRunningProcesses(void *d, unsigned *n, void *p) { *n = 0; return 0; }
int nvmlSystemGetCudaDriverVersion_v2(int *v) { *v = 13020; return 0; }
int nvmlDeviceGetGpuFabricInfoV(void *d, void *p) { return 3; }
