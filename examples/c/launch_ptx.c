/* PTX of halfbyte, launched with the CUDA driver alone: the library is needed to emit it, not here.
 *   halfbyte ptx dequantize --format int4 --arch sm_75 -o dequantize.ptx
 *   launch_ptx dequantize.ptx
 * `halfbyte ptx dequantize --format int4 --describe` prints parameters, grid and block, of which this program
 * has the formulas written out. Exit code 77: there is no CUDA device. */
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { kSkipped = 77 };

/* What is used of the driver, as cuda.h declares it. */
typedef unsigned long long device_pointer;
static int (*cuInit)(unsigned flags);
static int (*cuDeviceGet)(int* device, int ordinal);
static int (*cuDevicePrimaryCtxRetain)(void** context, int device);
static int (*cuCtxSetCurrent)(void* context);
static int (*cuModuleLoadData)(void** module, const void* image);
static int (*cuModuleGetFunction)(void** function, void* module, const char* name);
static int (*cuMemAlloc)(device_pointer* memory, size_t num_bytes);
static int (*cuMemcpyHtoD)(device_pointer to, const void* from, size_t num_bytes);
static int (*cuMemcpyDtoH)(void* to, device_pointer from, size_t num_bytes);
static int (*cuLaunchKernel)(void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                             unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared_bytes,
                             void* stream, void** parameters, void** extra);

/* Sets a pointer to a function of the driver. */
static int find(void* library, const char* name, void* function) {
  void* const symbol = dlsym(library, name);
  memcpy(function, &symbol, sizeof symbol);
  return symbol != NULL;
}
static int find_driver(void) {
  void* const cuda = dlopen("libcuda.so.1", RTLD_NOW);
  return cuda != NULL && find(cuda, "cuInit", &cuInit) && find(cuda, "cuDeviceGet", &cuDeviceGet) &&
         find(cuda, "cuDevicePrimaryCtxRetain", &cuDevicePrimaryCtxRetain) &&
         find(cuda, "cuCtxSetCurrent", &cuCtxSetCurrent) &&
         find(cuda, "cuModuleLoadData", &cuModuleLoadData) &&
         find(cuda, "cuModuleGetFunction", &cuModuleGetFunction) &&
         find(cuda, "cuMemAlloc_v2", &cuMemAlloc) && find(cuda, "cuMemcpyHtoD_v2", &cuMemcpyHtoD) &&
         find(cuda, "cuMemcpyDtoH_v2", &cuMemcpyDtoH) && find(cuda, "cuLaunchKernel", &cuLaunchKernel);
}

static void check(int result, const char* what) {
  if (result == 0) return;
  fprintf(stderr, "%s: CUDA error %d\n", what, result);
  exit(1);
}

/* A text file, with a zero byte behind it. */
static char* read_text(const char* path) {
  FILE* const file = fopen(path, "rb");
  char* text;
  size_t size = 0, capacity = 1 << 16, count;
  if (file == NULL || (text = malloc(capacity)) == NULL) {
    fprintf(stderr, "%s cannot be read\n", path);
    exit(1);
  }
  while ((count = fread(text + size, 1, capacity - size - 1, file)) > 0) {
    size += count;
    if (capacity - size > 1) continue;
    text = realloc(text, capacity *= 2);
    if (text == NULL) exit(1);
  }
  fclose(file);
  text[size] = 0;
  return text;
}

static device_pointer upload(const void* data, size_t num_bytes) {
  device_pointer memory = 0;
  check(cuMemAlloc(&memory, num_bytes), "cuMemAlloc");
  check(cuMemcpyHtoD(memory, data, num_bytes), "cuMemcpyHtoD");
  return memory;
}

/* The matrix: rows of 4-bit codes, two in a byte, the first in the low half; a scale for 32 neighbours. */
enum { kRows = 3, kCols = 101, kGroupSize = 32 };
enum { kGroups = (kCols + kGroupSize - 1) / kGroupSize, kRowBytes = (kCols * 4 + 7) / 8 };

int main(int argc, char** argv) {
  static uint8_t codes[kRows][kRowBytes];
  static float scales[kRows][kGroups], y[kRows][kCols];
  void *context = NULL, *module = NULL, *function = NULL;
  int device = 0, row, col, num_wrong = 0;
  char* ptx;
  if (argc != 2) {
    fprintf(stderr, "usage: launch_ptx FILE\n");
    return 2;
  }
  ptx = read_text(argv[1]);
  if (!find_driver() || cuInit(0) != 0 || cuDeviceGet(&device, 0) != 0) {
    printf("there is no CUDA device\n");
    free(ptx);
    return kSkipped;
  }
  check(cuDevicePrimaryCtxRetain(&context, device), "cuDevicePrimaryCtxRetain");
  check(cuCtxSetCurrent(context), "cuCtxSetCurrent");
  check(cuModuleLoadData(&module, ptx), "cuModuleLoadData");
  check(cuModuleGetFunction(&function, module, "halfbyte_dequantize"), "cuModuleGetFunction");
  free(ptx);

  for (row = 0; row < kRows; ++row) {
    for (col = 0; col < kCols; ++col)
      codes[row][col / 2] |= (uint8_t)((row * 5 + col * 3) % 16 << (col % 2 * 4));
    for (col = 0; col < kGroups; ++col) scales[row][col] = 0.25f * (float)(1 + row * kGroups + col);
  }
  {
    device_pointer to_codes = upload(codes, sizeof codes), to_scales = upload(scales, sizeof scales);
    device_pointer zeros = 0, biases = 0, to_y = upload(y, sizeof y); /* int4 has neither zeros nor biases */
    int64_t rows = kRows, cols = kCols, group_size = kGroupSize;
    void* parameters[] = {&to_codes, &to_scales, &zeros, &biases, &to_y, &rows, &cols, &group_size};
    /* "grid": "max(1, min(2147483647, (rows * ((cols + 7) / 8) + 255) / 256))", "block": "256" */
    const unsigned grid = (unsigned)((rows * ((cols + 7) / 8) + 255) / 256), block = 256;
    check(cuLaunchKernel(function, grid, 1, 1, block, 1, 1, 0, NULL, parameters, NULL), "cuLaunchKernel");
    check(cuMemcpyDtoH(y, to_y, sizeof y), "cuMemcpyDtoH"); /* waits for the kernel */
  }
  /* Codes of int4 are stored as q + 8; the value is q * scale. */
  for (row = 0; row < kRows; ++row)
    for (col = 0; col < kCols; ++col)
      num_wrong += y[row][col] != (float)((row * 5 + col * 3) % 16 - 8) * scales[row][col / kGroupSize];
  printf("%d values, %d of them wrong\n", kRows * kCols, num_wrong);
  return num_wrong != 0;
}
