/* The C interface of halfbyte, for C and for every language that can call C. It offers what the headers *.hpp
 * offer in C++, except measurements, files of the caller's own, and groups of processes and devices. C99 and
 * C++.
 *
 * Functions return a halfbyte_status, except those that return text, a pointer, a number or nothing. After a
 * failure, halfbyte_last_error() says what is wrong. A function that fails does not change what its result
 * pointers point to, and leaves output arrays undefined. No exception leaves a function. NULL is
 * HALFBYTE_USAGE unless the comment allows it.
 *
 * Structures begin with struct_size, which the caller sets to the size of the structure in the caller's
 * header. The _init functions do this, and set every other field to its default. For a field that an older,
 * smaller structure lacks, a newer library uses the default, or does not write it. An older library refuses a
 * larger structure if a byte that it does not know is not zero.
 *
 * Tensors are DLTensor (DLPack 1.x), described in halfbyte/dlpack.hpp: extents and strides in elements,
 * strides may be NULL, on the CPU or on CUDA devices. The DLTensor and its shape are used only until the call
 * returns. A run on a CUDA device uses the memory until the stream is done with it. `stream` is a CUstream
 * (cudaStream_t) of the device; NULL is its default stream. The CPU ignores it. Flags are 0 or 1. Text is
 * UTF-8.
 *
 * docs/c-api.md describes life times, threads and errors; docs/numerics.md defines the numbers. */
#ifndef HALFBYTE_HALFBYTE_H
#define HALFBYTE_HALFBYTE_H

#include <stddef.h>
#include <stdint.h>

#include "halfbyte/dlpack.h"
#include "halfbyte/export.h"
#include "halfbyte/version.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- Status, errors, version */

typedef int32_t halfbyte_status;
enum {
  HALFBYTE_OK = 0,
  HALFBYTE_BUG = 1,         /* an internal invariant failed */
  HALFBYTE_USAGE = 2,       /* wrong arguments, unknown names */
  HALFBYTE_BAD_INPUT = 3,   /* malformed, unsupported or non-finite data */
  HALFBYTE_VERIFY = 4,      /* a result failed its own check */
  HALFBYTE_DEVICE = 5,      /* no capable device, driver or NVRTC; device memory */
  HALFBYTE_IO = 6,          /* a file operation failed */
  HALFBYTE_NO_MEMORY = 7,   /* host memory */
  HALFBYTE_EXISTS = 8,      /* the output exists, or is being written */
  HALFBYTE_CORRUPT = 9,     /* halfbyte's own files are damaged */
  HALFBYTE_CANCELLED = 130, /* a progress function asked to stop */
};

/* "OK", "USAGE", ...; "BUG" for a number that is none of these. */
HALFBYTE_API const char* halfbyte_status_name(halfbyte_status status);
/* The text of the last failure on this thread: operation, argument, rule and values. "" before the first
 * failure. Stays until the next failure on this thread. */
HALFBYTE_API const char* halfbyte_last_error(void);

/* Finer than the status: ErrorKind in halfbyte/error.hpp describes each. */
typedef int32_t halfbyte_error_kind;
enum {
  HALFBYTE_ERROR_KIND_GENERAL = 0,
  HALFBYTE_ERROR_KIND_INVALID_ARGUMENT = 1,
  HALFBYTE_ERROR_KIND_INVALID_PROBLEM = 2,
  HALFBYTE_ERROR_KIND_UNSUPPORTED = 3,
  HALFBYTE_ERROR_KIND_MISALIGNED = 4,
  HALFBYTE_ERROR_KIND_BUFFER_TOO_SMALL = 5,
  HALFBYTE_ERROR_KIND_WORKSPACE_TOO_SMALL = 6,
  HALFBYTE_ERROR_KIND_COMPILATION_FAILED = 7,
  HALFBYTE_ERROR_KIND_LAUNCH_FAILED = 8,
};
/* Of the last failure on this thread, like its text: the kind, the argument ("codes"), what it must be and
 * what it is. "" where one is not known. */
HALFBYTE_API halfbyte_error_kind halfbyte_last_error_kind(void);
HALFBYTE_API const char* halfbyte_last_error_argument(void);
HALFBYTE_API const char* halfbyte_last_error_expected(void);
HALFBYTE_API const char* halfbyte_last_error_actual(void);
/* "general", "invalid-argument", ...; NULL for a number that is none of these. */
HALFBYTE_API const char* halfbyte_error_kind_name(halfbyte_error_kind kind);

/* The version of the library at run time. HALFBYTE_VERSION and HALFBYTE_VERSION_STRING are that of the
 * header. */
HALFBYTE_API int32_t halfbyte_version(void);
HALFBYTE_API const char* halfbyte_version_string(void);

/* ---- Words: enumerators and the text that the tool and files use */

enum { HALFBYTE_UNSET = -1 }; /* for any of these types, where it is allowed: the default */

typedef int32_t halfbyte_dtype;
enum {
  HALFBYTE_DTYPE_F32 = 0,
  HALFBYTE_DTYPE_F16 = 1,
  HALFBYTE_DTYPE_BF16 = 2,
  HALFBYTE_DTYPE_F64 = 3,
  HALFBYTE_DTYPE_I8 = 4,
  HALFBYTE_DTYPE_U8 = 5,
  HALFBYTE_DTYPE_I32 = 6,
  HALFBYTE_DTYPE_U32 = 7,
  HALFBYTE_DTYPE_I64 = 8,
  HALFBYTE_DTYPE_I4 = 9,  /* two elements a byte, the first in the low half */
  HALFBYTE_DTYPE_U4 = 10, /* likewise */
  HALFBYTE_DTYPE_F8_E4M3 = 11,
  HALFBYTE_DTYPE_F8_E8M0 = 12,
};

typedef int32_t halfbyte_format;
enum {
  HALFBYTE_FORMAT_NF4 = 0,
  HALFBYTE_FORMAT_FP4 = 1,
  HALFBYTE_FORMAT_FP4_E2M1 = 2,
  HALFBYTE_FORMAT_LUT4 = 3,
  HALFBYTE_FORMAT_INT2 = 4,
  HALFBYTE_FORMAT_INT3 = 5,
  HALFBYTE_FORMAT_INT4 = 6,
  HALFBYTE_FORMAT_INT5 = 7,
  HALFBYTE_FORMAT_INT6 = 8,
  HALFBYTE_FORMAT_INT8 = 9,
  HALFBYTE_FORMAT_AFFINE2 = 10,
  HALFBYTE_FORMAT_AFFINE3 = 11,
  HALFBYTE_FORMAT_AFFINE4 = 12,
  HALFBYTE_FORMAT_AFFINE5 = 13,
  HALFBYTE_FORMAT_AFFINE6 = 14,
  HALFBYTE_FORMAT_AFFINE8 = 15,
  HALFBYTE_FORMAT_NVFP4 = 16,
  HALFBYTE_FORMAT_MXFP4 = 17,
  HALFBYTE_FORMAT_FP8 = 18,
};

typedef int32_t halfbyte_scale_rule;
enum {
  HALFBYTE_SCALE_RULE_ABSMAX = 0,
  HALFBYTE_SCALE_RULE_HALF_RANGE = 1,
  HALFBYTE_SCALE_RULE_SIGNED_MAX = 2,
  HALFBYTE_SCALE_RULE_MINMAX = 3,
  HALFBYTE_SCALE_RULE_MLX_EDGE = 4,
};

typedef int32_t halfbyte_granularity;
enum {
  HALFBYTE_GRANULARITY_TENSOR = 0,
  HALFBYTE_GRANULARITY_CHANNEL = 1,
  HALFBYTE_GRANULARITY_GROUP = 2,
  HALFBYTE_GRANULARITY_FLAT = 3,
};

typedef int32_t halfbyte_code_scale;
enum {
  HALFBYTE_CODE_SCALE_STORED = 0,
  HALFBYTE_CODE_SCALE_UNROUNDED = 1,
};

typedef int32_t halfbyte_layout;
enum {
  HALFBYTE_LAYOUT_HALFBYTE = 0,
  HALFBYTE_LAYOUT_BITSANDBYTES = 1,
  HALFBYTE_LAYOUT_COMPRESSED_TENSORS = 2,
  HALFBYTE_LAYOUT_MLX = 3,
  HALFBYTE_LAYOUT_GPTQ = 4,
  HALFBYTE_LAYOUT_AWQ = 5,
  HALFBYTE_LAYOUT_MODELOPT = 6,
  HALFBYTE_LAYOUT_FP8 = 7,
  HALFBYTE_LAYOUT_GPT_OSS = 8,
};

/* What a checkpoint is to load in. */
typedef int32_t halfbyte_reader;
enum {
  HALFBYTE_READER_TRANSFORMERS_5 = 0,
  HALFBYTE_READER_TRANSFORMERS_4 = 1,
  HALFBYTE_READER_VLLM = 2,
  HALFBYTE_READER_MLX_LM = 3,
  HALFBYTE_READER_NONE = 4,
};

/* From the word ("nf4", "bf16", "half-range", "compressed-tensors"). For an unknown word, HALFBYTE_USAGE; the
 * text names the known ones. */
HALFBYTE_API halfbyte_status halfbyte_dtype_find(const char* word, halfbyte_dtype* dtype);
HALFBYTE_API halfbyte_status halfbyte_format_find(const char* word, halfbyte_format* format);
HALFBYTE_API halfbyte_status halfbyte_scale_rule_find(const char* word, halfbyte_scale_rule* rule);
HALFBYTE_API halfbyte_status halfbyte_layout_find(const char* word, halfbyte_layout* layout);
HALFBYTE_API halfbyte_status halfbyte_reader_find(const char* word, halfbyte_reader* reader);
/* "cpu", "cuda" or "cuda:1". Does not check whether the device exists. */
HALFBYTE_API halfbyte_status halfbyte_device_find(const char* word, DLDevice* device);
/* To the word; NULL for a number that is none of these. */
HALFBYTE_API const char* halfbyte_dtype_name(halfbyte_dtype dtype);
HALFBYTE_API const char* halfbyte_format_name(halfbyte_format format);
HALFBYTE_API const char* halfbyte_scale_rule_name(halfbyte_scale_rule rule);
HALFBYTE_API const char* halfbyte_layout_name(halfbyte_layout layout);
HALFBYTE_API const char* halfbyte_reader_name(halfbyte_reader reader);

/* Bytes that a function made. A 0 byte follows them, which size does not count. */
typedef struct halfbyte_blob halfbyte_blob;
HALFBYTE_API const void* halfbyte_blob_data(const halfbyte_blob* blob);
HALFBYTE_API int64_t halfbyte_blob_size(const halfbyte_blob* blob);
/* NULL is fine. */
HALFBYTE_API void halfbyte_blob_destroy(halfbyte_blob* blob);

/* ---- Quantization: halfbyte/format.hpp and halfbyte/ops.hpp */

/* How the codes of a quantized tensor are read. By default nf4 in groups of 64 with f32 scales. */
typedef struct halfbyte_quant_spec {
  size_t struct_size;
  halfbyte_format format;
  int32_t asymmetric; /* flag: integer formats: with an integer zero point */
  halfbyte_granularity granularity;
  halfbyte_dtype scale_dtype;
  int32_t double_quant; /* flag: the scales are quantized too. 0 for halfbyte_quantize and _dequantize */
  float table[16];      /* lut4: the values, ascending */
  int64_t group_size;   /* elements; for granularity group and flat */
} halfbyte_quant_spec;
HALFBYTE_API halfbyte_status halfbyte_quant_spec_init(halfbyte_quant_spec* spec, size_t struct_size);
/* Whether the fields fit together. */
HALFBYTE_API halfbyte_status halfbyte_quant_spec_check(const halfbyte_quant_spec* spec);

/* How codes are chosen, which only encoding asks for. By default the rule of the format (minmax with zero
 * points), and codes decided by the stored scale. */
typedef struct halfbyte_encoding {
  size_t struct_size;
  halfbyte_scale_rule scale_rule; /* HALFBYTE_UNSET: the default */
  halfbyte_code_scale code_scale;
  /* With search, of halfbyte_quantize: f32 [cols], on the device of x, how much the squared error of each
   * column counts, finite and not negative; NULL: all alike. Elsewhere NULL. */
  const DLTensor* importance;
  int64_t search; /* flag: of sixteen scales of each group, the one with the least squared error */
} halfbyte_encoding;
HALFBYTE_API halfbyte_status halfbyte_encoding_init(halfbyte_encoding* encoding, size_t struct_size);

/* Sizes of a quantized matrix [rows, cols]. QuantShape in halfbyte/format.hpp describes the layout of its
 * parts. */
typedef struct halfbyte_quant_shape {
  size_t struct_size;
  int64_t rows;             /* of codes: 1 for granularity flat */
  int64_t cols;             /* elements of such a row */
  int64_t row_bytes;        /* bytes of codes of such a row */
  int64_t group_size;       /* elements that share a scale */
  int64_t groups_per_row;   /* 0 for an empty row */
  int64_t num_groups;       /* scales, zeros and biases: elements in all */
  int64_t code_bytes;       /* codes: bytes in all */
  int32_t has_zeros;        /* flag */
  int32_t has_biases;       /* flag */
  int64_t has_global_scale; /* flag */
} halfbyte_quant_shape;
HALFBYTE_API halfbyte_status halfbyte_quant_shape_of(const halfbyte_quant_spec* spec, int64_t rows,
                                                     int64_t cols, halfbyte_quant_shape* shape);

/* How an operation runs. */
typedef struct halfbyte_execution {
  size_t struct_size;
  int64_t num_threads; /* CPU: 0: all, but 1 for small work; 1: on the calling thread only */
  void* stream;
} halfbyte_execution;
HALFBYTE_API halfbyte_status halfbyte_execution_init(halfbyte_execution* execution, size_t struct_size);

/* What was found in the data. QuantizeStatus in halfbyte/ops.hpp describes the counts. */
typedef struct halfbyte_quantize_status {
  size_t struct_size;
  int64_t num_nonfinite;   /* elements: NaN or infinite */
  int64_t first_nonfinite; /* row-major index, -1: none */
  int64_t num_unheld_scales;
  int64_t num_coarse_scales; /* no fault: the stored scale has fewer than 8 significant bits */
  int64_t num_invalid_scales;
  int64_t num_invalid_zero_points;
} halfbyte_quantize_status;

/* Smallest and largest finite value; +infinity and -infinity if there is none. */
typedef struct halfbyte_value_range {
  size_t struct_size;
  double min, max;
  int64_t num_nonfinite;
  int64_t first_nonfinite; /* row-major index, -1: none */
} halfbyte_value_range;
/* x: contiguous, f32, f16, bf16 or f64. execution: NULL: the defaults. Waits for the stream. */
HALFBYTE_API halfbyte_status halfbyte_value_range_of(const DLTensor* x, const halfbyte_execution* execution,
                                                     halfbyte_value_range* range);

/* The parts of a quantized matrix: contiguous, of any shape, with the numbers of elements in
 * halfbyte_quant_shape. A part that the spec does not have is NULL. */
typedef struct halfbyte_quantized {
  size_t struct_size;
  const DLTensor* codes;        /* u8, code_bytes elements */
  const DLTensor* scales;       /* spec->scale_dtype, num_groups elements */
  const DLTensor* zeros;        /* u8, num_groups elements: asymmetric integers */
  const DLTensor* biases;       /* spec->scale_dtype, num_groups elements: affine formats */
  const DLTensor* global_scale; /* f32, one element: nvfp4 */
} halfbyte_quantized;
HALFBYTE_API halfbyte_status halfbyte_quantized_init(halfbyte_quantized* quantized, size_t struct_size);

/* Quantizes x [..., cols] (contiguous; f32, f16, bf16 or f64), with rows the product of its other extents,
 * into `out`. All are on the device of x; nothing overlaps. Waits for the stream. encoding, execution: NULL
 * means the defaults. range: with granularity tensor or nvfp4, if x is a block of a tensor, the range of
 * the whole tensor; otherwise NULL. status: receives what was found in x. If it is NULL, an element that is
 * not finite, or a scale that its dtype cannot hold, is HALFBYTE_BAD_INPUT. */
HALFBYTE_API halfbyte_status halfbyte_quantize(const DLTensor* x, const halfbyte_quant_spec* spec,
                                               const halfbyte_encoding* encoding,
                                               const halfbyte_quantized* out,
                                               const halfbyte_execution* execution,
                                               const halfbyte_value_range* range,
                                               halfbyte_quantize_status* status);
/* Decodes into y [..., cols] (contiguous; f32, f16, bf16 or f64). All are on the device of y; nothing
 * overlaps. On a CUDA device the work is enqueued on the stream; on the CPU it is done when the function
 * returns. */
HALFBYTE_API halfbyte_status halfbyte_dequantize(const halfbyte_quantized* in,
                                                 const halfbyte_quant_spec* spec, const DLTensor* y,
                                                 const halfbyte_execution* execution);

/* Double quantization of scales, in host memory: scales f32 [n] become codes u8 [n], absmax f32 [ceil(n /
 * 256)] and *offset. All are contiguous. */
HALFBYTE_API halfbyte_status halfbyte_double_quantize(const DLTensor* scales, const DLTensor* codes,
                                                      const DLTensor* absmax, float* offset);
HALFBYTE_API halfbyte_status halfbyte_double_dequantize(const DLTensor* codes, const DLTensor* absmax,
                                                        float offset, const DLTensor* scales);

/* ---- INT4 and NF4 of flat buffers: halfbyte/simple.hpp, which has the rules for buffers */

/* ceil(n / group_size) and ceil(n / 2). */
HALFBYTE_API halfbyte_status halfbyte_int4_num_groups(int64_t n, int64_t group_size, int64_t* num_groups);
HALFBYTE_API halfbyte_status halfbyte_int4_packed_bytes(int64_t n, int64_t* num_bytes);
/* zeros: NULL where `symmetric`. execution: NULL: the defaults. */
HALFBYTE_API halfbyte_status halfbyte_quantize_int4(const DLTensor* x, const DLTensor* codes,
                                                    const DLTensor* scales, const DLTensor* zeros, int64_t n,
                                                    int64_t group_size, int32_t symmetric,
                                                    const halfbyte_execution* execution);
HALFBYTE_API halfbyte_status halfbyte_dequantize_int4(const DLTensor* codes, const DLTensor* scales,
                                                      const DLTensor* zeros, const DLTensor* y, int64_t n,
                                                      int64_t group_size, int32_t symmetric,
                                                      const halfbyte_execution* execution);
HALFBYTE_API halfbyte_status halfbyte_quantize_nf4(const DLTensor* x, const DLTensor* codes,
                                                   const DLTensor* scales, int64_t n, int64_t group_size,
                                                   const halfbyte_execution* execution);
HALFBYTE_API halfbyte_status halfbyte_dequantize_nf4(const DLTensor* codes, const DLTensor* scales,
                                                     const DLTensor* y, int64_t n, int64_t group_size,
                                                     const halfbyte_execution* execution);

/* ---- Plans: halfbyte/plan.hpp. An operation prepared once and run many times.
 *
 * Each operation has three functions. _select makes a plan. _can_implement returns what _run would return for
 * these tensors. _run is asynchronous on the stream, allocates no memory, and can be captured in a CUDA
 * graph. The other functions take the plan of any operation. Threads may share a plan and run it at the same
 * time, each run with a workspace of its own, of workspace_bytes bytes; Workspace in halfbyte/plan.hpp
 * describes it. On the CPU it may be NULL and 0 bytes: the run then uses memory that the library holds for
 * the calling thread, and has no status. */

typedef struct halfbyte_plan halfbyte_plan;

typedef struct halfbyte_plan_preference {
  size_t struct_size;
  int64_t num_threads; /* CPU: 0: all, but 1 for small work; 1: on the calling thread only */
} halfbyte_plan_preference;
HALFBYTE_API halfbyte_status halfbyte_plan_preference_init(halfbyte_plan_preference* preference,
                                                           size_t struct_size);

/* NULL is fine. After its last run is done, a plan does not use its workspace. */
HALFBYTE_API void halfbyte_plan_destroy(halfbyte_plan* plan);

/* The operation of a plan; 0: none of this version. */
typedef int32_t halfbyte_op_kind;
enum {
  HALFBYTE_OP_OTHER = 0,
  HALFBYTE_OP_QUANTIZE = 1,
  HALFBYTE_OP_DEQUANTIZE = 2,
  HALFBYTE_OP_QUANTIZE_LINEAR = 3,
  HALFBYTE_OP_DEQUANTIZE_LINEAR = 4,
  HALFBYTE_OP_QUANTIZE_LINEAR_BACKWARD = 5,
  HALFBYTE_OP_FAKE_QUANTIZE = 6,
  HALFBYTE_OP_FAKE_QUANTIZE_BACKWARD = 7,
  HALFBYTE_OP_FAKE_QUANTIZE_LEARNED_BACKWARD = 8,
  HALFBYTE_OP_OBSERVE = 9,
  HALFBYTE_OP_COMPUTE_QPARAMS = 10,
  HALFBYTE_OP_AFFINE_INIT = 11,
  HALFBYTE_OP_AFFINE_QDQ = 12,
  HALFBYTE_OP_AFFINE_QDQ_BACKWARD = 13,
  HALFBYTE_OP_QGEMM = 14,
  HALFBYTE_OP_ROUTE = 15,
  HALFBYTE_OP_QGEMM_GROUPED = 16,
};

/* What a kernel was compiled for. */
typedef int32_t halfbyte_arch;
enum {
  HALFBYTE_ARCH_NONE = 0,  /* nothing runs: the tensors are empty */
  HALFBYTE_ARCH_OTHER = 1, /* none of this list: halfbyte_sku.backend names it */
  HALFBYTE_ARCH_SCALAR = 2,
  HALFBYTE_ARCH_AVX2 = 3,
  HALFBYTE_ARCH_AVX3 = 4,
  HALFBYTE_ARCH_AVX3_DL = 5,
  HALFBYTE_ARCH_AVX3_ZEN4 = 6,
  HALFBYTE_ARCH_AVX512_BF16 = 7,
  HALFBYTE_ARCH_AMX_BF16 = 8,
  HALFBYTE_ARCH_SM_75 = 9,
  HALFBYTE_ARCH_SM_80 = 10,
  HALFBYTE_ARCH_SM_86 = 11,
  HALFBYTE_ARCH_SM_87 = 12,
  HALFBYTE_ARCH_SM_89 = 13,
  HALFBYTE_ARCH_SM_90A = 14,
  HALFBYTE_ARCH_SM_100A = 15,
  HALFBYTE_ARCH_SM_103A = 16,
  HALFBYTE_ARCH_SM_120A = 17,
  HALFBYTE_ARCH_SM_121A = 18,
};
/* To the word, as halfbyte_sku has it; NULL for a number that is none of these. */
HALFBYTE_API const char* halfbyte_op_kind_name(halfbyte_op_kind kind);
HALFBYTE_API const char* halfbyte_arch_name(halfbyte_arch arch);

/* The kernel that a plan runs. The text lives as long as the plan. */
typedef struct halfbyte_sku {
  size_t struct_size;
  const char* op;      /* "quantize_linear" */
  const char* kernel;  /* "quantize_linear_cpu" */
  const char* backend; /* "cpu AVX3_DL", "cuda sm_90a" */
  const char* dtypes;  /* "bf16 -> i8, scale f32" */
  /* The same as enumerators; Sku in halfbyte/plan.hpp describes each. */
  halfbyte_op_kind op_kind;
  halfbyte_arch arch;
  halfbyte_dtype element;
  halfbyte_dtype aux_element; /* HALFBYTE_UNSET: none */
  halfbyte_layout layout;     /* HALFBYTE_UNSET: none */
  int32_t device_type;        /* kDLCPU, kDLCUDA */
} halfbyte_sku;
HALFBYTE_API halfbyte_status halfbyte_plan_sku(const halfbyte_plan* plan, halfbyte_sku* sku);

/* How the weights of a product are rounded before they are multiplied: WeightRounding in halfbyte/plan.hpp.
 */
typedef int32_t halfbyte_weight_rounding;
enum {
  HALFBYTE_WEIGHT_ROUNDING_NONE = 0,
  HALFBYTE_WEIGHT_ROUNDING_CODE_ROUNDED = 1,
  HALFBYTE_WEIGHT_ROUNDING_WEIGHT_ROUNDED = 2,
};
/* "none", "code-rounded", "weight-rounded"; NULL for a number that is none of these. */
HALFBYTE_API const char* halfbyte_weight_rounding_name(halfbyte_weight_rounding rounding);

typedef struct halfbyte_precision_guarantee {
  size_t struct_size;
  halfbyte_dtype math;         /* what decides codes and values */
  halfbyte_dtype accumulator;  /* of sums */
  int32_t deterministic;       /* flag: the same bytes run to run */
  int32_t same_on_all_devices; /* flag: and for every device, SIMD target and number of threads */
  int64_t weight_rounding;     /* halfbyte_weight_rounding */
} halfbyte_precision_guarantee;
HALFBYTE_API halfbyte_status halfbyte_plan_precision_guarantee(const halfbyte_plan* plan,
                                                               halfbyte_precision_guarantee* guarantee);

HALFBYTE_API halfbyte_status halfbyte_plan_device(const halfbyte_plan* plan, DLDevice* device);
/* Bytes of memory of the device that a run needs, at an address that is a multiple of 16. Never 0. */
HALFBYTE_API halfbyte_status halfbyte_plan_workspace_size(const halfbyte_plan* plan, int64_t* num_bytes);
/* What the last run with this workspace found in the data. Waits for the stream, which may not be capturing.
 */
HALFBYTE_API halfbyte_status halfbyte_plan_status(const halfbyte_plan* plan, void* stream,
                                                  const void* workspace, int64_t workspace_bytes,
                                                  halfbyte_quantize_status* status);

/* Packed formats: halfbyte/quantize_plan.hpp describes the fields and the two operations. */
typedef struct halfbyte_quantize_descriptor {
  size_t struct_size;
  const halfbyte_quant_spec* spec;   /* double_quant: 0; only _select uses it */
  const halfbyte_encoding* encoding; /* of quantize; NULL: the defaults; only _select uses it */
  halfbyte_dtype dtype;              /* of x and y */
  int64_t rows;
  int64_t cols;
  int64_t alignment; /* bytes: of x, y and codes */
} halfbyte_quantize_descriptor;
/* f32 in memory aligned to 16 bytes. The caller sets spec, rows and cols. */
HALFBYTE_API halfbyte_status halfbyte_quantize_descriptor_init(halfbyte_quantize_descriptor* descriptor,
                                                               size_t struct_size);

/* x [..., cols] -> out. Nothing overlaps. */
typedef struct halfbyte_quantize_args {
  size_t struct_size;
  const DLTensor* x;
  const halfbyte_quantized* out; /* written */
} halfbyte_quantize_args;
HALFBYTE_API halfbyte_status halfbyte_quantize_args_init(halfbyte_quantize_args* args, size_t struct_size);
HALFBYTE_API halfbyte_status halfbyte_quantize_select(DLDevice device,
                                                      const halfbyte_quantize_descriptor* descriptor,
                                                      const halfbyte_plan_preference* preference,
                                                      halfbyte_plan** plan);
HALFBYTE_API halfbyte_status halfbyte_quantize_can_implement(const halfbyte_plan* plan,
                                                             const halfbyte_quantize_args* args);
HALFBYTE_API halfbyte_status halfbyte_quantize_run(const halfbyte_plan* plan, void* stream, void* workspace,
                                                   int64_t workspace_bytes,
                                                   const halfbyte_quantize_args* args);

/* in -> y [..., cols]. Nothing overlaps. */
typedef struct halfbyte_dequantize_args {
  size_t struct_size;
  const halfbyte_quantized* in;
  const DLTensor* y; /* written */
} halfbyte_dequantize_args;
HALFBYTE_API halfbyte_status halfbyte_dequantize_args_init(halfbyte_dequantize_args* args,
                                                           size_t struct_size);
HALFBYTE_API halfbyte_status halfbyte_dequantize_select(DLDevice device,
                                                        const halfbyte_quantize_descriptor* descriptor,
                                                        const halfbyte_plan_preference* preference,
                                                        halfbyte_plan** plan);
HALFBYTE_API halfbyte_status halfbyte_dequantize_can_implement(const halfbyte_plan* plan,
                                                               const halfbyte_dequantize_args* args);
HALFBYTE_API halfbyte_status halfbyte_dequantize_run(const halfbyte_plan* plan, void* stream, void* workspace,
                                                     int64_t workspace_bytes,
                                                     const halfbyte_dequantize_args* args);

/* Linear quantization: halfbyte/quantize_linear.hpp describes the fields and the three operations, which take
 * one descriptor. Zero points are any int32_t. */
typedef struct halfbyte_linear_descriptor {
  size_t struct_size;
  const int64_t* shape; /* of x, y, codes and gradients; only _select uses it */
  int32_t ndim;
  halfbyte_granularity granularity; /* tensor, channel or group */
  int32_t axis;                     /* of channel and group; -1: the last */
  int32_t q_min, q_max;
  halfbyte_dtype dtype;
  halfbyte_dtype code_dtype;
  halfbyte_dtype scale_dtype;
  halfbyte_dtype zero_point_dtype; /* HALFBYTE_UNSET: symmetric */
  halfbyte_scale_rule scale_rule;  /* where computed */
  int64_t group_size;              /* elements */
  int64_t alignment;               /* bytes, on a CUDA device; less than 16: codes lie anywhere */
  int32_t computed;                /* flag: quantize computes scale and zero point and writes them */
  int32_t strided;                 /* flag: x, y, codes and gradients may have strides */
} halfbyte_linear_descriptor;
/* A tensor of rank 0, f32 to i8 in -128 ... 127, with one given f32 scale. */
HALFBYTE_API halfbyte_status halfbyte_linear_descriptor_init(halfbyte_linear_descriptor* descriptor,
                                                             size_t struct_size);
/* The shape of scale and zero point: *ndim gets its rank (0, 1 or descriptor->ndim), scale_shape its extents,
 * for which it must have room for max(1, descriptor->ndim). */
HALFBYTE_API halfbyte_status halfbyte_linear_descriptor_scale_shape(
    const halfbyte_linear_descriptor* descriptor, int32_t* ndim, int64_t* scale_shape);
/* q_max - q_min + 1. */
HALFBYTE_API halfbyte_status
halfbyte_linear_descriptor_num_levels(const halfbyte_linear_descriptor* descriptor, int64_t* num_levels);

/* x -> codes. Nothing overlaps. */
typedef struct halfbyte_quantize_linear_args {
  size_t struct_size;
  const DLTensor* x;
  const DLTensor* codes;      /* written */
  const DLTensor* scale;      /* written where computed */
  const DLTensor* zero_point; /* likewise; NULL where symmetric */
} halfbyte_quantize_linear_args;
HALFBYTE_API halfbyte_status halfbyte_quantize_linear_args_init(halfbyte_quantize_linear_args* args,
                                                                size_t struct_size);
HALFBYTE_API halfbyte_status halfbyte_quantize_linear_select(DLDevice device,
                                                             const halfbyte_linear_descriptor* descriptor,
                                                             const halfbyte_plan_preference* preference,
                                                             halfbyte_plan** plan);
HALFBYTE_API halfbyte_status
halfbyte_quantize_linear_can_implement(const halfbyte_plan* plan, const halfbyte_quantize_linear_args* args);
HALFBYTE_API halfbyte_status halfbyte_quantize_linear_run(const halfbyte_plan* plan, void* stream,
                                                          void* workspace, int64_t workspace_bytes,
                                                          const halfbyte_quantize_linear_args* args);

/* codes -> y. Nothing overlaps. */
typedef struct halfbyte_dequantize_linear_args {
  size_t struct_size;
  const DLTensor* codes;
  const DLTensor* scale;
  const DLTensor* zero_point; /* NULL where symmetric */
  const DLTensor* y;          /* written */
} halfbyte_dequantize_linear_args;
HALFBYTE_API halfbyte_status halfbyte_dequantize_linear_args_init(halfbyte_dequantize_linear_args* args,
                                                                  size_t struct_size);
HALFBYTE_API halfbyte_status halfbyte_dequantize_linear_select(DLDevice device,
                                                               const halfbyte_linear_descriptor* descriptor,
                                                               const halfbyte_plan_preference* preference,
                                                               halfbyte_plan** plan);
HALFBYTE_API halfbyte_status halfbyte_dequantize_linear_can_implement(
    const halfbyte_plan* plan, const halfbyte_dequantize_linear_args* args);
HALFBYTE_API halfbyte_status halfbyte_dequantize_linear_run(const halfbyte_plan* plan, void* stream,
                                                            void* workspace, int64_t workspace_bytes,
                                                            const halfbyte_dequantize_linear_args* args);

/* x, dy -> dx. dx may be dy; nothing else overlaps. */
typedef struct halfbyte_quantize_linear_backward_args {
  size_t struct_size;
  const DLTensor* x;
  const DLTensor* dy;
  const DLTensor* scale;
  const DLTensor* zero_point; /* NULL where symmetric */
  const DLTensor* dx;         /* written */
} halfbyte_quantize_linear_backward_args;
HALFBYTE_API halfbyte_status
halfbyte_quantize_linear_backward_args_init(halfbyte_quantize_linear_backward_args* args, size_t struct_size);
HALFBYTE_API halfbyte_status
halfbyte_quantize_linear_backward_select(DLDevice device, const halfbyte_linear_descriptor* descriptor,
                                         const halfbyte_plan_preference* preference, halfbyte_plan** plan);
HALFBYTE_API halfbyte_status halfbyte_quantize_linear_backward_can_implement(
    const halfbyte_plan* plan, const halfbyte_quantize_linear_backward_args* args);
HALFBYTE_API halfbyte_status halfbyte_quantize_linear_backward_run(
    const halfbyte_plan* plan, void* stream, void* workspace, int64_t workspace_bytes,
    const halfbyte_quantize_linear_backward_args* args);

/* ---- Scales and zero points from ranges, observers: halfbyte/qparams.hpp and halfbyte/observe.hpp describe
 * the fields, the rules and the errors */

typedef struct halfbyte_qparams_config {
  size_t struct_size;
  int32_t q_min, q_max;
  int32_t asymmetric; /* flag */
  halfbyte_scale_rule scale_rule;
  double eps;
} halfbyte_qparams_config;
/* Symmetric, -128 ... 127, absmax, no eps. */
HALFBYTE_API halfbyte_status halfbyte_qparams_config_init(halfbyte_qparams_config* config,
                                                          size_t struct_size);
/* dtype: of min and max and of the arithmetic: f32 or f64. */
HALFBYTE_API halfbyte_status halfbyte_compute_qparams(double min, double max,
                                                      const halfbyte_qparams_config* config,
                                                      halfbyte_dtype scale_dtype, halfbyte_dtype dtype,
                                                      double* scale, int32_t* zero_point);

typedef int32_t halfbyte_observer_kind;
enum {
  HALFBYTE_OBSERVER_MIN_MAX = 0,
  HALFBYTE_OBSERVER_MOVING_AVERAGE = 1,
  HALFBYTE_OBSERVER_PERCENTILE = 2,
  HALFBYTE_OBSERVER_MSE = 3,
};
/* "min-max", "moving-average", ...; NULL for a number that is none of these. */
HALFBYTE_API const char* halfbyte_observer_kind_name(halfbyte_observer_kind kind);
HALFBYTE_API halfbyte_status halfbyte_observer_kind_find(const char* word, halfbyte_observer_kind* kind);

typedef struct halfbyte_observer_config {
  size_t struct_size;
  halfbyte_observer_kind kind;
  double momentum;                        /* moving average: weight of history */
  double percentile;                      /* in (0, 100] */
  const halfbyte_qparams_config* qparams; /* mse; NULL: the defaults */
} halfbyte_observer_config;
/* min-max, momentum 0.99, percentile 99.99. */
HALFBYTE_API halfbyte_status halfbyte_observer_config_init(halfbyte_observer_config* config,
                                                           size_t struct_size);

/* What an observer has seen, in arrays of the caller: num_groups values each. */
typedef struct halfbyte_observer_state {
  size_t struct_size;
  halfbyte_dtype dtype; /* f32, f64 */
  double* min;
  double* max;
  int64_t num_groups;
  int64_t num_batches;    /* of min-max and moving average; not used where there is group_batches */
  int64_t* group_batches; /* of percentile and mse: those in which a group had finite values; else NULL */
} halfbyte_observer_state;
/* f32, no groups, nothing seen. The caller sets min, max and num_groups, and group_batches for percentile and
 * mse, which is one count of each group. */
HALFBYTE_API halfbyte_status halfbyte_observer_state_init(halfbyte_observer_state* state, size_t struct_size);
/* Nothing seen: +inf and -inf, no batches. */
HALFBYTE_API halfbyte_status halfbyte_observer_state_reset(halfbyte_observer_state* state);
/* Adds a batch by its num_groups ranges: +inf and -inf of a group without finite values. */
HALFBYTE_API halfbyte_status halfbyte_observer_state_update(halfbyte_observer_state* state,
                                                            const halfbyte_observer_config* config,
                                                            const double* batch_min, const double* batch_max);
HALFBYTE_API halfbyte_status halfbyte_observer_state_merge(halfbyte_observer_state* state,
                                                           const halfbyte_observer_config* config,
                                                           const halfbyte_observer_state* other);
/* Writes num_groups scales and zero points. */
HALFBYTE_API halfbyte_status halfbyte_observer_state_qparams(const halfbyte_observer_state* state,
                                                             const halfbyte_qparams_config* config,
                                                             halfbyte_dtype scale_dtype, double* scale,
                                                             int32_t* zero_point);
/* These functions set and copy the tensors of a state on their device: min and max are f32 or f64,
 * num_batches is i64, [] or as min and max. On a CUDA device they wait for the stream. */
HALFBYTE_API halfbyte_status halfbyte_observer_reset(const DLTensor* min, const DLTensor* max,
                                                     const DLTensor* num_batches, void* stream);
/* state must have arrays for as many groups, and the dtype of the tensors; group_batches where num_batches
 * has a count of each group. */
HALFBYTE_API halfbyte_status halfbyte_observer_load(const DLTensor* min, const DLTensor* max,
                                                    const DLTensor* num_batches, void* stream,
                                                    halfbyte_observer_state* state);
HALFBYTE_API halfbyte_status halfbyte_observer_store(const halfbyte_observer_state* state,
                                                     const DLTensor* min, const DLTensor* max,
                                                     const DLTensor* num_batches, void* stream);

/* The plan of observe, which adds a batch to a state on the device. */
typedef struct halfbyte_observe_descriptor {
  size_t struct_size;
  const int64_t* shape; /* of x; only _select uses it, and observer */
  int32_t ndim;
  halfbyte_granularity granularity;         /* tensor, channel or group */
  int32_t axis;                             /* of channel and group; -1: the last */
  halfbyte_dtype dtype;                     /* of x */
  int64_t group_size;                       /* elements */
  int64_t alignment;                        /* bytes: of x */
  const halfbyte_observer_config* observer; /* NULL: the defaults */
} halfbyte_observe_descriptor;
/* A tensor of rank 0, f32, in memory aligned to 16 bytes. */
HALFBYTE_API halfbyte_status halfbyte_observe_descriptor_init(halfbyte_observe_descriptor* descriptor,
                                                              size_t struct_size);
/* The shape of min and max: *ndim gets its rank (0, 1 or descriptor->ndim), state_shape its extents, for
 * which it must have room for max(1, descriptor->ndim). */
HALFBYTE_API halfbyte_status halfbyte_observe_descriptor_state_shape(
    const halfbyte_observe_descriptor* descriptor, int32_t* ndim, int64_t* state_shape);
/* Likewise of num_batches: [], or the state_shape of percentile and mse. */
HALFBYTE_API halfbyte_status halfbyte_observe_descriptor_count_shape(
    const halfbyte_observe_descriptor* descriptor, int32_t* ndim, int64_t* count_shape);

/* Adds x to the state. Nothing overlaps. */
typedef struct halfbyte_observe_args {
  size_t struct_size;
  const DLTensor* x;
  const DLTensor* min;         /* read and written: f32, f64 for f64 */
  const DLTensor* max;         /* likewise */
  const DLTensor* num_batches; /* likewise: i64, count_shape */
} halfbyte_observe_args;
HALFBYTE_API halfbyte_status halfbyte_observe_args_init(halfbyte_observe_args* args, size_t struct_size);
HALFBYTE_API halfbyte_status halfbyte_observe_select(DLDevice device,
                                                     const halfbyte_observe_descriptor* descriptor,
                                                     const halfbyte_plan_preference* preference,
                                                     halfbyte_plan** plan);
HALFBYTE_API halfbyte_status halfbyte_observe_can_implement(const halfbyte_plan* plan,
                                                            const halfbyte_observe_args* args);
HALFBYTE_API halfbyte_status halfbyte_observe_run(const halfbyte_plan* plan, void* stream, void* workspace,
                                                  int64_t workspace_bytes, const halfbyte_observe_args* args);

/* The plan of compute_qparams, for ranges on the device. */
typedef struct halfbyte_qparams_descriptor {
  size_t struct_size;
  const int64_t* shape;                  /* of all tensors; only _select uses it, and config */
  const halfbyte_qparams_config* config; /* NULL: the defaults */
  int32_t ndim;
  halfbyte_dtype dtype; /* of min and max: f32, f64 */
  halfbyte_dtype scale_dtype;
  halfbyte_dtype zero_point_dtype; /* i32, i8, u8; HALFBYTE_UNSET: none, where symmetric and signed */
} halfbyte_qparams_descriptor;
/* Of rank 0, f32, f32 scales without zero points. */
HALFBYTE_API halfbyte_status halfbyte_qparams_descriptor_init(halfbyte_qparams_descriptor* descriptor,
                                                              size_t struct_size);

/* min, max -> scale, zero_point. Nothing overlaps. */
typedef struct halfbyte_compute_qparams_args {
  size_t struct_size;
  const DLTensor* min;
  const DLTensor* max;
  const DLTensor* scale;      /* written */
  const DLTensor* zero_point; /* written; NULL where the descriptor has none */
} halfbyte_compute_qparams_args;
HALFBYTE_API halfbyte_status halfbyte_compute_qparams_args_init(halfbyte_compute_qparams_args* args,
                                                                size_t struct_size);
HALFBYTE_API halfbyte_status halfbyte_compute_qparams_select(DLDevice device,
                                                             const halfbyte_qparams_descriptor* descriptor,
                                                             const halfbyte_plan_preference* preference,
                                                             halfbyte_plan** plan);
HALFBYTE_API halfbyte_status
halfbyte_compute_qparams_can_implement(const halfbyte_plan* plan, const halfbyte_compute_qparams_args* args);
HALFBYTE_API halfbyte_status halfbyte_compute_qparams_run(const halfbyte_plan* plan, void* stream,
                                                          void* workspace, int64_t workspace_bytes,
                                                          const halfbyte_compute_qparams_args* args);

/* Training the scales and biases of an affine quantization. halfbyte/affine_qdq.hpp describes the fields and
 * the three operations. Each operation uses some of the fields. */
typedef struct halfbyte_affine_qdq_descriptor {
  size_t struct_size;
  int64_t rows, cols;
  int64_t group_size; /* elements, along a row */
  int64_t alignment;  /* bytes: of w, y and dy */
  int32_t bits;       /* of a code: 2, 3, 4, 5, 6, 8 */
  int32_t packed;     /* flag: codes are a stream of bits; 0: each code has a byte */
  halfbyte_dtype dtype;
  halfbyte_dtype scale_dtype;
  halfbyte_scale_rule scale_rule; /* minmax or mlx_edge */
  int32_t half_away;              /* flag: codes are rounded half away from zero; else half to even */
  int32_t refit;                  /* flag: init ends with a least-squares fit over the codes */
  int32_t adam;                   /* flag: backward makes a step of Adam */
  int64_t n_bins;                 /* levels: 2 .. 2^bits; 0: 2^bits */
} halfbyte_affine_qdq_descriptor;
/* An empty matrix, packed 4-bit codes with all levels, groups of 64, all f32, minmax. */
HALFBYTE_API halfbyte_status halfbyte_affine_qdq_descriptor_init(halfbyte_affine_qdq_descriptor* descriptor,
                                                                 size_t struct_size);
/* The shapes of codes (u8), and of scales, biases, their gradients and moments. */
HALFBYTE_API halfbyte_status halfbyte_affine_qdq_descriptor_shapes(
    const halfbyte_affine_qdq_descriptor* descriptor, int64_t code_shape[2], int64_t scale_shape[2]);

/* w -> codes, scales, biases. Nothing overlaps. */
typedef struct halfbyte_affine_init_args {
  size_t struct_size;
  const DLTensor* w;
  const DLTensor* codes;  /* written */
  const DLTensor* scales; /* written */
  const DLTensor* biases; /* written */
} halfbyte_affine_init_args;
HALFBYTE_API halfbyte_status halfbyte_affine_init_args_init(halfbyte_affine_init_args* args,
                                                            size_t struct_size);
HALFBYTE_API halfbyte_status halfbyte_affine_init_select(DLDevice device,
                                                         const halfbyte_affine_qdq_descriptor* descriptor,
                                                         const halfbyte_plan_preference* preference,
                                                         halfbyte_plan** plan);
HALFBYTE_API halfbyte_status halfbyte_affine_init_can_implement(const halfbyte_plan* plan,
                                                                const halfbyte_affine_init_args* args);
HALFBYTE_API halfbyte_status halfbyte_affine_init_run(const halfbyte_plan* plan, void* stream,
                                                      void* workspace, int64_t workspace_bytes,
                                                      const halfbyte_affine_init_args* args);

/* codes, scales, biases -> y. Nothing overlaps. */
typedef struct halfbyte_affine_qdq_args {
  size_t struct_size;
  const DLTensor* codes;
  const DLTensor* scales;
  const DLTensor* biases;
  const DLTensor* y; /* written */
} halfbyte_affine_qdq_args;
HALFBYTE_API halfbyte_status halfbyte_affine_qdq_args_init(halfbyte_affine_qdq_args* args,
                                                           size_t struct_size);
HALFBYTE_API halfbyte_status halfbyte_affine_qdq_select(DLDevice device,
                                                        const halfbyte_affine_qdq_descriptor* descriptor,
                                                        const halfbyte_plan_preference* preference,
                                                        halfbyte_plan** plan);
HALFBYTE_API halfbyte_status halfbyte_affine_qdq_can_implement(const halfbyte_plan* plan,
                                                               const halfbyte_affine_qdq_args* args);
HALFBYTE_API halfbyte_status halfbyte_affine_qdq_run(const halfbyte_plan* plan, void* stream, void* workspace,
                                                     int64_t workspace_bytes,
                                                     const halfbyte_affine_qdq_args* args);

/* A step of Adam. */
typedef struct halfbyte_adam_step {
  size_t struct_size;
  double learning_rate, beta1, beta2, epsilon;
  int64_t step; /* number of this step, from 1 */
} halfbyte_adam_step;
/* 1e-3, 0.9, 0.999, 1e-8, step 1. */
HALFBYTE_API halfbyte_status halfbyte_adam_step_init(halfbyte_adam_step* step, size_t struct_size);

/* codes, dy -> dscales, dbiases (f32). With adam, also a step of scales and biases. Nothing overlaps. */
typedef struct halfbyte_affine_qdq_backward_args {
  size_t struct_size;
  const DLTensor* codes;
  const DLTensor* dy;
  const DLTensor* dscales; /* written; NULL where not wanted, both only with adam */
  const DLTensor* dbiases; /* likewise */
  /* Only with adam, otherwise NULL: f32, read and written. The moments are 0 before step 1. */
  const DLTensor* scales;
  const DLTensor* biases;
  const DLTensor* scale_m;
  const DLTensor* scale_v;
  const DLTensor* bias_m;
  const DLTensor* bias_v;
  const halfbyte_adam_step* adam;
} halfbyte_affine_qdq_backward_args;
HALFBYTE_API halfbyte_status halfbyte_affine_qdq_backward_args_init(halfbyte_affine_qdq_backward_args* args,
                                                                    size_t struct_size);
HALFBYTE_API halfbyte_status
halfbyte_affine_qdq_backward_select(DLDevice device, const halfbyte_affine_qdq_descriptor* descriptor,
                                    const halfbyte_plan_preference* preference, halfbyte_plan** plan);
HALFBYTE_API halfbyte_status halfbyte_affine_qdq_backward_can_implement(
    const halfbyte_plan* plan, const halfbyte_affine_qdq_backward_args* args);
HALFBYTE_API halfbyte_status halfbyte_affine_qdq_backward_run(const halfbyte_plan* plan, void* stream,
                                                              void* workspace, int64_t workspace_bytes,
                                                              const halfbyte_affine_qdq_backward_args* args);

/* ---- Fake quantization: halfbyte/fake_quantize.hpp describes the fields and the three operations, which
 * take one descriptor */

typedef struct halfbyte_fake_quantize_descriptor {
  size_t struct_size;
  const int64_t* shape; /* of x, y and gradients; only _select and the shapes use the pointers */
  int32_t ndim;
  halfbyte_granularity granularity; /* tensor, channel or group */
  int64_t group_size;               /* elements */
  int32_t axis;                     /* of channel and group; -1: the last */
  halfbyte_format format;           /* of kind table; HALFBYTE_UNSET: integers */
  const float* table;               /* lut4: its 16 values, ascending; else NULL */
  int32_t q_min, q_max;
  halfbyte_dtype dtype;
  halfbyte_dtype scale_dtype;               /* f32 or dtype; of nvfp4 f8_e4m3, of mxfp4 f8_e8m0 */
  halfbyte_dtype zero_point_dtype;          /* i32, or learned f32, f64; HALFBYTE_UNSET: none */
  halfbyte_scale_rule scale_rule;           /* where computed */
  double eps;                               /* likewise */
  const halfbyte_observer_config* observer; /* likewise; NULL: none */
  double gradient_scale;                    /* of the learned backward operation */
  int64_t alignment;                        /* bytes */
  int32_t computed;                         /* flag: forward computes scale and zero point and writes them */
  int32_t mask;                             /* flag: forward writes the mask, backward reads it */
  int64_t computed_global_scale;            /* flag: of nvfp4, where computed: the global scale is, too */
} halfbyte_fake_quantize_descriptor;
/* A tensor of rank 0, f32, integers in -8 ... 7, with one given f32 scale. */
HALFBYTE_API halfbyte_status
halfbyte_fake_quantize_descriptor_init(halfbyte_fake_quantize_descriptor* descriptor, size_t struct_size);
/* As halfbyte_linear_descriptor_scale_shape. */
HALFBYTE_API halfbyte_status halfbyte_fake_quantize_descriptor_scale_shape(
    const halfbyte_fake_quantize_descriptor* descriptor, int32_t* ndim, int64_t* scale_shape);
/* The same for the mask, u8. */
HALFBYTE_API halfbyte_status halfbyte_fake_quantize_descriptor_mask_shape(
    const halfbyte_fake_quantize_descriptor* descriptor, int32_t* ndim, int64_t* mask_shape);
/* q_max - q_min + 1; 16 of a table. */
HALFBYTE_API halfbyte_status halfbyte_fake_quantize_descriptor_num_levels(
    const halfbyte_fake_quantize_descriptor* descriptor, int64_t* num_levels);

/* x -> y. y may be the same memory as x; nothing else overlaps. */
typedef struct halfbyte_fake_quantize_args {
  size_t struct_size;
  const DLTensor* x;
  const DLTensor* y;          /* written */
  const DLTensor* scale;      /* written where computed */
  const DLTensor* zero_point; /* likewise; NULL where the descriptor has none */
  const DLTensor* mask;       /* written; NULL where the descriptor has none */
  const DLTensor* min;        /* the observer's state, read and written; NULL where the descriptor has none */
  const DLTensor* max;        /* likewise */
  const DLTensor* num_batches;  /* likewise */
  const DLTensor* global_scale; /* f32 [1]: read, or written where computed; NULL unless format is nvfp4 */
} halfbyte_fake_quantize_args;
HALFBYTE_API halfbyte_status halfbyte_fake_quantize_args_init(halfbyte_fake_quantize_args* args,
                                                              size_t struct_size);
HALFBYTE_API halfbyte_status
halfbyte_fake_quantize_select(DLDevice device, const halfbyte_fake_quantize_descriptor* descriptor,
                              const halfbyte_plan_preference* preference, halfbyte_plan** plan);
HALFBYTE_API halfbyte_status halfbyte_fake_quantize_can_implement(const halfbyte_plan* plan,
                                                                  const halfbyte_fake_quantize_args* args);
HALFBYTE_API halfbyte_status halfbyte_fake_quantize_run(const halfbyte_plan* plan, void* stream,
                                                        void* workspace, int64_t workspace_bytes,
                                                        const halfbyte_fake_quantize_args* args);

/* x, dy -> dx. dx may be the same memory as dy; nothing else overlaps. */
typedef struct halfbyte_fake_quantize_backward_args {
  size_t struct_size;
  const DLTensor* x;    /* NULL with a mask */
  const DLTensor* mask; /* NULL without */
  const DLTensor* dy;
  const DLTensor* scale;      /* NULL with a mask */
  const DLTensor* zero_point; /* likewise, and where the descriptor has none */
  const DLTensor* dx;         /* written */
} halfbyte_fake_quantize_backward_args;
HALFBYTE_API halfbyte_status
halfbyte_fake_quantize_backward_args_init(halfbyte_fake_quantize_backward_args* args, size_t struct_size);
HALFBYTE_API halfbyte_status
halfbyte_fake_quantize_backward_select(DLDevice device, const halfbyte_fake_quantize_descriptor* descriptor,
                                       const halfbyte_plan_preference* preference, halfbyte_plan** plan);
HALFBYTE_API halfbyte_status halfbyte_fake_quantize_backward_can_implement(
    const halfbyte_plan* plan, const halfbyte_fake_quantize_backward_args* args);
HALFBYTE_API halfbyte_status halfbyte_fake_quantize_backward_run(
    const halfbyte_plan* plan, void* stream, void* workspace, int64_t workspace_bytes,
    const halfbyte_fake_quantize_backward_args* args);

/* x, dy -> dx and the gradients of scale and zero point. dx may be the same memory as dy; nothing else
 * overlaps. */
typedef struct halfbyte_fake_quantize_learned_backward_args {
  size_t struct_size;
  const DLTensor* x;
  const DLTensor* dy;
  const DLTensor* scale;
  const DLTensor* zero_point;  /* NULL where the descriptor has none */
  const DLTensor* dx;          /* written */
  const DLTensor* dscale;      /* written: of the state's dtype, f32 or f64 */
  const DLTensor* dzero_point; /* written; NULL unless zero points are learned */
} halfbyte_fake_quantize_learned_backward_args;
HALFBYTE_API halfbyte_status halfbyte_fake_quantize_learned_backward_args_init(
    halfbyte_fake_quantize_learned_backward_args* args, size_t struct_size);
HALFBYTE_API halfbyte_status halfbyte_fake_quantize_learned_backward_select(
    DLDevice device, const halfbyte_fake_quantize_descriptor* descriptor,
    const halfbyte_plan_preference* preference, halfbyte_plan** plan);
HALFBYTE_API halfbyte_status halfbyte_fake_quantize_learned_backward_can_implement(
    const halfbyte_plan* plan, const halfbyte_fake_quantize_learned_backward_args* args);
HALFBYTE_API halfbyte_status halfbyte_fake_quantize_learned_backward_run(
    const halfbyte_plan* plan, void* stream, void* workspace, int64_t workspace_bytes,
    const halfbyte_fake_quantize_learned_backward_args* args);

/* ---- Products with quantized weights: halfbyte/qgemm.hpp has the formulas and describes the fields */

/* A quantized matrix [rows, cols] in one of the layouts. A part that the spec does not have is NULL. */
typedef struct halfbyte_weight_view {
  size_t struct_size;
  const halfbyte_quant_spec* spec;
  int64_t rows, cols;
  /* Contiguous; codes and zeros of any dtype, with as many bytes as the layout has. */
  const DLTensor* codes;
  const DLTensor* scales;       /* of spec->scale_dtype; double quantization: u8 */
  const DLTensor* zeros;        /* asymmetric integers */
  const DLTensor* biases;       /* of spec->scale_dtype: affine formats */
  const DLTensor* absmax;       /* double quantization: f32 [ceil(number of scales / 256)] */
  const DLTensor* map;          /* likewise: f32 [256] */
  const DLTensor* offset;       /* likewise: f32, one element */
  int64_t layout;               /* halfbyte_layout */
  const DLTensor* global_scale; /* nvfp4: f32, one element */
} halfbyte_weight_view;
HALFBYTE_API halfbyte_status halfbyte_weight_view_init(halfbyte_weight_view* view, size_t struct_size);

/* A packed weight, which products in both directions read: one array, at a multiple of 64 bytes on the CPU
 * and of 256 on a CUDA device. */
typedef struct halfbyte_packed_weight {
  size_t struct_size;
  const halfbyte_quant_spec* spec;
  int64_t rows, cols;
  const DLTensor* data; /* u8, of at least halfbyte_packed_weight_bytes */
  int64_t version;      /* of the form, 2 */
} halfbyte_packed_weight;
HALFBYTE_API halfbyte_status halfbyte_packed_weight_init(halfbyte_packed_weight* weight, size_t struct_size);
HALFBYTE_API halfbyte_status halfbyte_packed_weight_bytes(const halfbyte_quant_spec* spec, int64_t rows,
                                                          int64_t cols, int64_t* num_bytes);

/* To the packed form and back, exactly. They run on the device of the memory; on a CUDA device they are
 * enqueued on the stream. Nothing overlaps. execution: NULL means the defaults. */
HALFBYTE_API halfbyte_status halfbyte_reorder_to_packed(const halfbyte_weight_view* from,
                                                        const halfbyte_packed_weight* to,
                                                        const halfbyte_execution* execution);
HALFBYTE_API halfbyte_status halfbyte_reorder_from_packed(const halfbyte_packed_weight* from,
                                                          const halfbyte_weight_view* to,
                                                          const halfbyte_execution* execution);

/* The rows of `count` weights, one behind the other, as one: PackedTensor::concat_rows in halfbyte/qgemm.hpp
 * says which go together. `to`: of their spec, columns and device, with the rows of all; it overlaps none of
 * them. On a CUDA device it is enqueued on the stream; where there is a global scale, the call waits for it
 * to compare them. */
HALFBYTE_API halfbyte_status halfbyte_packed_concat_rows(const halfbyte_packed_weight* const* weights,
                                                         int64_t count, const halfbyte_packed_weight* to,
                                                         void* stream);
/* The columns likewise: PackedTensor::concat_cols. */
HALFBYTE_API halfbyte_status halfbyte_packed_concat_cols(const halfbyte_packed_weight* const* weights,
                                                         int64_t count, const halfbyte_packed_weight* to,
                                                         void* stream);
/* Elements [begin, end) along one axis. */
typedef struct halfbyte_slice {
  int64_t axis, begin, end;
} halfbyte_slice;
/* Rows (axis 0) or columns (axis 1) of a packed weight, which PackedTensor::slice has the rules of. `to`: of
 * the spec and device of `from`, with the extents of the slice; they do not overlap. On a CUDA device it is
 * enqueued on the stream. */
HALFBYTE_API halfbyte_status halfbyte_packed_slice(const halfbyte_packed_weight* from,
                                                   const halfbyte_slice* slice,
                                                   const halfbyte_packed_weight* to, void* stream);

typedef int32_t halfbyte_qgemm_math;
enum {
  HALFBYTE_QGEMM_MATH_AUTO = 0,
  HALFBYTE_QGEMM_MATH_TF32 = 1,
  HALFBYTE_QGEMM_MATH_F64 = 2,
  HALFBYTE_QGEMM_MATH_INT8 = 3,
};
/* "auto", "tf32", "f64", "int8". HALFBYTE_USAGE for other words; NULL for a number that is none of these. */
HALFBYTE_API halfbyte_status halfbyte_qgemm_math_find(const char* word, halfbyte_qgemm_math* math);
HALFBYTE_API const char* halfbyte_qgemm_math_name(halfbyte_qgemm_math math);

typedef struct halfbyte_qgemm_descriptor {
  size_t struct_size;
  const halfbyte_quant_spec* spec; /* of the weight [n, k]; only _select and _explain use it */
  const char* variant;             /* the variant to use; NULL: the first that does not refuse */
  int64_t m, n, k;
  int64_t alignment; /* bytes: of x, y, bias and the codes of a view */
  halfbyte_dtype dtype;
  halfbyte_layout layout; /* of a weight that is not packed */
  halfbyte_qgemm_math math;
  int32_t tile_m, tile_n; /* 0: chosen */
  int32_t transposed;     /* flag */
  int32_t packed;         /* flag; 0: a view, which most variants pack into the workspace first */
  int32_t bias;           /* flag */
  int32_t accumulate;     /* flag */
  int32_t early_start;    /* flag */
} halfbyte_qgemm_descriptor;
/* Forward, bf16, a packed weight. The caller sets spec and extents. */
HALFBYTE_API halfbyte_status halfbyte_qgemm_descriptor_init(halfbyte_qgemm_descriptor* descriptor,
                                                            size_t struct_size);
/* One line for each variant, in the order in which they are tried, those of the device's kind first: its
 * name, " (packs the view first)" where each run does that, ": ", and the reason if it refuses the
 * description. */
HALFBYTE_API halfbyte_status halfbyte_qgemm_explain(DLDevice device,
                                                    const halfbyte_qgemm_descriptor* descriptor,
                                                    halfbyte_blob** text);

/* y = x . W^T (+ bias), transposed: y = x . W. y overlaps nothing. */
typedef struct halfbyte_qgemm_args {
  size_t struct_size;
  const DLTensor* x;
  const halfbyte_packed_weight* weight; /* if packed, otherwise NULL */
  const halfbyte_weight_view* view;     /* else */
  const DLTensor* bias;                 /* NULL where descriptor.bias is 0 */
  const DLTensor* y;                    /* written; read too to accumulate */
} halfbyte_qgemm_args;
HALFBYTE_API halfbyte_status halfbyte_qgemm_args_init(halfbyte_qgemm_args* args, size_t struct_size);
HALFBYTE_API halfbyte_status halfbyte_qgemm_select(DLDevice device,
                                                   const halfbyte_qgemm_descriptor* descriptor,
                                                   const halfbyte_plan_preference* preference,
                                                   halfbyte_plan** plan);
HALFBYTE_API halfbyte_status halfbyte_qgemm_can_implement(const halfbyte_plan* plan,
                                                          const halfbyte_qgemm_args* args);
HALFBYTE_API halfbyte_status halfbyte_qgemm_run(const halfbyte_plan* plan, void* stream, void* workspace,
                                                int64_t workspace_bytes, const halfbyte_qgemm_args* args);

/* The plans of one product for every m, which are selected when they are first wanted: QgemmPlans in
 * halfbyte/qgemm.hpp. descriptor.m is ignored. Threads may share the object. */
typedef struct halfbyte_qgemm_plans halfbyte_qgemm_plans;
HALFBYTE_API halfbyte_status halfbyte_qgemm_plans_create(DLDevice device,
                                                         const halfbyte_qgemm_descriptor* descriptor,
                                                         const halfbyte_plan_preference* preference,
                                                         halfbyte_qgemm_plans** plans);
/* Of a run with m rows of x. */
HALFBYTE_API halfbyte_status halfbyte_qgemm_plans_workspace_size(const halfbyte_qgemm_plans* plans, int64_t m,
                                                                 int64_t* num_bytes);
/* halfbyte_qgemm_run of the plan for the m of x. Where that is selected first, on a CUDA device a kernel may
 * be compiled, and the stream must not be capturing. */
HALFBYTE_API halfbyte_status halfbyte_qgemm_plans_run(const halfbyte_qgemm_plans* plans, void* stream,
                                                      void* workspace, int64_t workspace_bytes,
                                                      const halfbyte_qgemm_args* args);
/* NULL is fine. */
HALFBYTE_API void halfbyte_qgemm_plans_destroy(halfbyte_qgemm_plans* plans);

/* ---- Products with the weights of experts: halfbyte/qgemm_grouped.hpp has the formulas and describes the
 * fields */

typedef struct halfbyte_route_descriptor {
  size_t struct_size;
  halfbyte_dtype dtype; /* of experts: i32 or i64 */
  int64_t tokens, top_k, num_experts;
} halfbyte_route_descriptor;
/* i32, one slot for each token. The caller sets tokens and num_experts. */
HALFBYTE_API halfbyte_status halfbyte_route_descriptor_init(halfbyte_route_descriptor* descriptor,
                                                            size_t struct_size);

/* Slots in the order of their experts. Nothing overlaps. */
typedef struct halfbyte_route_args {
  size_t struct_size;
  const DLTensor* experts; /* [tokens, top_k] */
  const DLTensor* offsets; /* written: i32 [num_experts]: where the slots of an expert end */
  const DLTensor* slots;   /* written: i32 [tokens * top_k] */
} halfbyte_route_args;
HALFBYTE_API halfbyte_status halfbyte_route_args_init(halfbyte_route_args* args, size_t struct_size);
HALFBYTE_API halfbyte_status halfbyte_route_select(DLDevice device,
                                                   const halfbyte_route_descriptor* descriptor,
                                                   const halfbyte_plan_preference* preference,
                                                   halfbyte_plan** plan);
HALFBYTE_API halfbyte_status halfbyte_route_can_implement(const halfbyte_plan* plan,
                                                          const halfbyte_route_args* args);
HALFBYTE_API halfbyte_status halfbyte_route_run(const halfbyte_plan* plan, void* stream, void* workspace,
                                                int64_t workspace_bytes, const halfbyte_route_args* args);

typedef int32_t halfbyte_expert_rows;
enum {
  HALFBYTE_EXPERT_ROWS_OFFSETS = 0,
  HALFBYTE_EXPERT_ROWS_INDICES = 1,
  HALFBYTE_EXPERT_ROWS_MASKED = 2,
};
/* "offsets", "indices", "masked". HALFBYTE_USAGE for other words; NULL for a number that is none of these. */
HALFBYTE_API halfbyte_status halfbyte_expert_rows_find(const char* word, halfbyte_expert_rows* rows);
HALFBYTE_API const char* halfbyte_expert_rows_name(halfbyte_expert_rows rows);

typedef struct halfbyte_qgemm_grouped_descriptor {
  size_t struct_size;
  const halfbyte_quant_spec* spec; /* of the weights [n, k]; only _select and _explain use it */
  const char* variant;             /* the variant to use; NULL: the first that does not refuse */
  int64_t num_experts;
  int64_t m, n, k;
  halfbyte_dtype dtype; /* of x, y, bias and forward_x */
  halfbyte_expert_rows rows;
  int32_t transposed;       /* flag */
  int32_t x_per_slot;       /* flag; it, the next three and top_k above 1: only with indices */
  int32_t sum_slots;        /* flag */
  int32_t routing_weights;  /* flag */
  int32_t routing_gradient; /* flag */
  int32_t bias;             /* flag */
  int32_t swiglu;           /* flag; forward only: y has n / 2 columns */
  int32_t accumulate;       /* flag */
  int64_t top_k;            /* slots of a token */
  int64_t alignment;        /* bytes: of x, y, bias and forward_x */
} halfbyte_qgemm_grouped_descriptor;
/* Forward, bf16, rows in the order of the experts, one slot for each token. The caller sets spec, num_experts
 * and extents. */
HALFBYTE_API halfbyte_status
halfbyte_qgemm_grouped_descriptor_init(halfbyte_qgemm_grouped_descriptor* descriptor, size_t struct_size);
/* As halfbyte_qgemm_explain. */
HALFBYTE_API halfbyte_status halfbyte_qgemm_grouped_explain(
    DLDevice device, const halfbyte_qgemm_grouped_descriptor* descriptor, halfbyte_blob** text);

/* y[row] = x[row] . W[e]^T (+ bias[e]), transposed: x[row] . W[e], of the expert e of the row. y and
 * routing_grad overlap nothing. */
typedef struct halfbyte_qgemm_grouped_args {
  size_t struct_size;
  const DLTensor* x;
  /* The weights of all experts: rows and cols are those of one, data has all of them, that of expert e at e
   * times halfbyte_packed_weight_bytes. */
  const halfbyte_packed_weight* weight;
  const DLTensor* offsets;         /* i32 [num_experts] */
  const DLTensor* slots;           /* i32 [m * top_k]; NULL where descriptor.rows is not indices */
  const DLTensor* routing_weights; /* f32 [m, top_k]; NULL where descriptor.routing_weights is 0 */
  const DLTensor* bias;            /* [num_experts, n]; NULL where descriptor.bias is 0 */
  const DLTensor* forward_x;       /* [m * top_k, k]; NULL where descriptor.routing_gradient is 0 */
  const DLTensor* routing_grad;    /* written: f32 [m, top_k]; likewise */
  const DLTensor* y;               /* written; read too to accumulate */
} halfbyte_qgemm_grouped_args;
HALFBYTE_API halfbyte_status halfbyte_qgemm_grouped_args_init(halfbyte_qgemm_grouped_args* args,
                                                              size_t struct_size);
HALFBYTE_API halfbyte_status
halfbyte_qgemm_grouped_select(DLDevice device, const halfbyte_qgemm_grouped_descriptor* descriptor,
                              const halfbyte_plan_preference* preference, halfbyte_plan** plan);
HALFBYTE_API halfbyte_status halfbyte_qgemm_grouped_can_implement(const halfbyte_plan* plan,
                                                                  const halfbyte_qgemm_grouped_args* args);
HALFBYTE_API halfbyte_status halfbyte_qgemm_grouped_run(const halfbyte_plan* plan, void* stream,
                                                        void* workspace, int64_t workspace_bytes,
                                                        const halfbyte_qgemm_grouped_args* args);

/* ---- Quantized weights that own their memory: QuantizedTensor in halfbyte/ops.hpp */

typedef struct halfbyte_quantized_weight halfbyte_quantized_weight;
/* Parts that are uninitialized, but for the map of double quantization. shape: of the dense weight, [experts,
 * rows, cols] for experts. dtype: of the dense weight. */
HALFBYTE_API halfbyte_status halfbyte_quantized_weight_create(const halfbyte_quant_spec* spec,
                                                              const int64_t* shape, int64_t ndim,
                                                              halfbyte_dtype dtype, DLDevice device,
                                                              halfbyte_quantized_weight** weight);
/* NULL is fine. Weights and packed weights that were made of this one remain. */
HALFBYTE_API void halfbyte_quantized_weight_destroy(halfbyte_quantized_weight* weight);

/* What it points to lives as long as the weight, as in all that follows. */
typedef struct halfbyte_quantized_weight_info {
  size_t struct_size;
  const int64_t* shape;
  int64_t ndim;
  int64_t dtype; /* halfbyte_dtype, of the dense weight */
  int64_t num_experts;
  int64_t num_bytes; /* of all parts */
  DLDevice device;
} halfbyte_quantized_weight_info;
HALFBYTE_API halfbyte_status halfbyte_quantized_weight_get_info(const halfbyte_quantized_weight* weight,
                                                                halfbyte_quantized_weight_info* info);
HALFBYTE_API halfbyte_status halfbyte_quantized_weight_get_spec(const halfbyte_quantized_weight* weight,
                                                                halfbyte_quant_spec* spec);
/* The parts, to read and to fill: those of halfbyte_quant_shape, with all leading axes folded into rows.
 * NULL: the spec does not have it. */
typedef struct halfbyte_quantized_weight_parts {
  size_t struct_size;
  const DLTensor* codes;        /* u8 */
  const DLTensor* scales;       /* of spec->scale_dtype; double quantization: u8 */
  const DLTensor* zeros;        /* u8 */
  const DLTensor* biases;       /* of spec->scale_dtype */
  const DLTensor* absmax;       /* double quantization: f32 [ceil(number of scales / 256)] */
  const DLTensor* map;          /* likewise: f32 [256] */
  const DLTensor* offset;       /* likewise: f32 [1] */
  const DLTensor* global_scale; /* nvfp4: f32 [1] */
} halfbyte_quantized_weight_parts;
HALFBYTE_API halfbyte_status halfbyte_quantized_weight_get_parts(const halfbyte_quantized_weight* weight,
                                                                 halfbyte_quantized_weight_parts* parts);
/* The matrix of one expert (0 of a weight of up to two axes) for products and halfbyte_reorder_to_packed. */
HALFBYTE_API halfbyte_status halfbyte_quantized_weight_get_view(const halfbyte_quantized_weight* weight,
                                                                int64_t expert, halfbyte_weight_view* view);
/* The same weight on another device, sharing the memory if it is there already. Waits for the stream. */
HALFBYTE_API halfbyte_status halfbyte_quantized_weight_to(const halfbyte_quantized_weight* weight,
                                                          DLDevice device, void* stream,
                                                          halfbyte_quantized_weight** result);
/* A part along an axis of the shape, in memory of its own: QuantizedTensor::slice. Waits for the stream. */
HALFBYTE_API halfbyte_status halfbyte_quantized_weight_slice(const halfbyte_quantized_weight* weight,
                                                             const halfbyte_slice* slice, void* stream,
                                                             halfbyte_quantized_weight** result);

/* Weights from codes that were made elsewhere, and back: halfbyte/convert.hpp has the rules. */

/* Codes, scale and zero point of quantize_linear. zero_point: NULL where the descriptor has none. execution:
 * NULL means the defaults. */
HALFBYTE_API halfbyte_status halfbyte_quantized_weight_from_linear(
    const halfbyte_linear_descriptor* descriptor, const DLTensor* codes, const DLTensor* scale,
    const DLTensor* zero_point, const halfbyte_execution* execution, halfbyte_quantized_weight** weight);
typedef struct halfbyte_linear_codes halfbyte_linear_codes;
/* HALFBYTE_USAGE also for several rows of an odd number of 4-bit codes, which DLPack does not have. */
HALFBYTE_API halfbyte_status halfbyte_quantized_weight_to_linear(const halfbyte_quantized_weight* weight,
                                                                 const halfbyte_execution* execution,
                                                                 halfbyte_linear_codes** codes);
/* What it points to, the shape of the descriptor too, lives as long as the object. */
typedef struct halfbyte_linear_codes_parts {
  size_t struct_size;
  const DLTensor* codes;
  const DLTensor* scale;
  const DLTensor* zero_point; /* NULL: the descriptor has none */
  halfbyte_linear_descriptor descriptor;
} halfbyte_linear_codes_parts;
HALFBYTE_API halfbyte_status halfbyte_linear_codes_get(const halfbyte_linear_codes* codes,
                                                       halfbyte_linear_codes_parts* parts);
/* NULL is fine. */
HALFBYTE_API void halfbyte_linear_codes_destroy(halfbyte_linear_codes* codes);

/* A flat buffer of 4-bit codes in host memory: format int4 or nf4, codes u8, scales f32, f64, f16 or bf16,
 * zeros likewise (asymmetric only; may be NULL). max_error, max_error_index: of the decoded values; may be
 * NULL. */
HALFBYTE_API halfbyte_status halfbyte_quantized_weight_from_flat(
    halfbyte_format format, int32_t symmetric, int64_t group_size, const DLTensor* codes,
    const DLTensor* scales, const DLTensor* zeros, const int64_t* shape, int64_t ndim,
    halfbyte_quantized_weight** weight, double* max_error, int64_t* max_error_index);

typedef struct halfbyte_packed_tensor halfbyte_packed_tensor;
/* The matrix of one expert in packed form, on the same device. On a CUDA device the work is enqueued on the
 * stream. execution: NULL means the defaults. */
HALFBYTE_API halfbyte_status halfbyte_quantized_weight_pack(const halfbyte_quantized_weight* weight,
                                                            int64_t expert,
                                                            const halfbyte_execution* execution,
                                                            halfbyte_packed_tensor** packed);
HALFBYTE_API halfbyte_status halfbyte_packed_tensor_get(const halfbyte_packed_tensor* packed,
                                                        halfbyte_packed_weight* weight);
/* NULL is fine. */
HALFBYTE_API void halfbyte_packed_tensor_destroy(halfbyte_packed_tensor* packed);

/* ---- Checkpoints: halfbyte/checkpoint.hpp */

/* Called from any thread, one call at a time. A result other than 0 cancels: HALFBYTE_CANCELLED, and no
 * output. */
typedef struct halfbyte_progress {
  size_t struct_size;
  const char* phase; /* "open", "plan", "quantize", "dequantize", "write", "verify", "compare", "sync",
                        "check", "copy" */
  uint64_t done_bytes;
  uint64_t total_bytes;
} halfbyte_progress;
typedef int (*halfbyte_progress_function)(const halfbyte_progress* progress, void* user_data);

typedef struct halfbyte_checkpoint halfbyte_checkpoint;
/* path: a .safetensors file, or a directory of a model. Validates every header. Threads may share a
 * checkpoint. */
HALFBYTE_API halfbyte_status halfbyte_checkpoint_open(const char* path, halfbyte_checkpoint** checkpoint);
/* NULL is fine. */
HALFBYTE_API void halfbyte_checkpoint_close(halfbyte_checkpoint* checkpoint);

typedef struct halfbyte_checkpoint_info {
  size_t struct_size;
  int32_t is_directory; /* flag */
  int64_t num_tensors;
  int64_t num_weights;
  int64_t num_foreign;
} halfbyte_checkpoint_info;
HALFBYTE_API halfbyte_status halfbyte_checkpoint_get_info(const halfbyte_checkpoint* checkpoint,
                                                          halfbyte_checkpoint_info* info);

/* A tensor as stored. What it points to lives as long as the checkpoint. */
typedef struct halfbyte_stored_tensor {
  size_t struct_size;
  const char* name;
  const char* dtype; /* as the file spells it: "BF16" */
  const char* file;  /* within the directory */
  const int64_t* shape;
  int64_t ndim;
  uint64_t offset; /* bytes from the start of the file */
  uint64_t num_bytes;
} halfbyte_stored_tensor;
HALFBYTE_API halfbyte_status halfbyte_checkpoint_get_tensor(const halfbyte_checkpoint* checkpoint,
                                                            int64_t index, halfbyte_stored_tensor* tensor);

/* A weight as a model sees it; they are sorted by name. What it points to lives as long as the checkpoint. */
typedef struct halfbyte_weight {
  size_t struct_size;
  const char* name;
  const int64_t* shape; /* of the dense weight */
  int64_t ndim;
  halfbyte_dtype dtype;   /* of the dense weight; HALFBYTE_UNSET: one that halfbyte does not have */
  halfbyte_layout layout; /* HALFBYTE_UNSET: dense */
  const int32_t* parts;   /* indices of tensors; a dense weight has one */
  int64_t num_parts;
  uint64_t num_bytes; /* of all parts */
  double bits_per_weight;
  const char* foreign; /* the method of the foreign quantization that it belongs to; NULL: none */
  const char* note;    /* what is unusual in how it is stored: "act-order", ...; NULL: nothing */
  int64_t scale_rows;  /* rows of a matrix that share the scale of a group: of fp8 in blocks more than 1 */
} halfbyte_weight;
HALFBYTE_API halfbyte_status halfbyte_checkpoint_get_weight(const halfbyte_checkpoint* checkpoint,
                                                            int64_t index, halfbyte_weight* weight);
/* Quantization by another tool in a form that is recognised and not read. What it points to lives as long as
 * the checkpoint. */
typedef struct halfbyte_foreign {
  size_t struct_size;
  const char* method;  /* "fp8", "nvfp4", ... */
  const char* layout;  /* whose tensors they are: "modelopt", ...; empty: of several tools */
  const char* source;  /* what says so: "config.json", "tensors", ... */
  const char* example; /* the codes of the first weight; empty: none was found */
  const char* advice;  /* how to make the model dense */
  int64_t num_weights; /* that were found */
  int64_t num_parameters;
} halfbyte_foreign;
HALFBYTE_API halfbyte_status halfbyte_checkpoint_get_foreign(const halfbyte_checkpoint* checkpoint,
                                                             int64_t index, halfbyte_foreign* foreign);
/* *value gets a JSON text: a list where parts of the model differ. */
HALFBYTE_API halfbyte_status halfbyte_checkpoint_get_foreign_parameter(const halfbyte_checkpoint* checkpoint,
                                                                       int64_t index, int64_t parameter,
                                                                       const char** key, const char** value);
/* Of a weight that is quantized. */
HALFBYTE_API halfbyte_status halfbyte_checkpoint_get_spec(const halfbyte_checkpoint* checkpoint,
                                                          int64_t index, halfbyte_quant_spec* spec);
/* *index gets the index of the weight, or -1 if no weight has the name. */
HALFBYTE_API halfbyte_status halfbyte_checkpoint_find(const halfbyte_checkpoint* checkpoint, const char* name,
                                                      int64_t* index);
/* Bytes [offset, offset + num_bytes) of a stored tensor. */
HALFBYTE_API halfbyte_status halfbyte_checkpoint_read(const halfbyte_checkpoint* checkpoint,
                                                      int64_t tensor_index, uint64_t offset,
                                                      uint64_t num_bytes, void* bytes);
/* Decodes the elements [begin, begin + elements of y) of the row-major weight into y: contiguous, on the CPU,
 * f32, f16, bf16 or f64. Uses the calling thread only. */
HALFBYTE_API halfbyte_status halfbyte_checkpoint_decode(const halfbyte_checkpoint* checkpoint,
                                                        int64_t weight_index, int64_t begin,
                                                        const DLTensor* y);

/* The parts of a quantized weight, from every layout. HALFBYTE_USAGE if it is dense. execution: NULL means
 * the defaults. slice: only a part along an axis, load_weight in halfbyte/checkpoint.hpp; NULL: all. */
HALFBYTE_API halfbyte_status halfbyte_checkpoint_load(const halfbyte_checkpoint* checkpoint,
                                                      int64_t weight_index, DLDevice device,
                                                      const halfbyte_execution* execution,
                                                      const halfbyte_slice* slice,
                                                      halfbyte_quantized_weight** weight);

/* What a run does with what an earlier one with its output left unfinished: Unfinished in
 * halfbyte/checkpoint.hpp. */
typedef int32_t halfbyte_unfinished;
enum {
  HALFBYTE_UNFINISHED_KEEP = 0, /* leaves it alone, and begins anew */
  HALFBYTE_UNFINISHED_RESUME = 1,
  HALFBYTE_UNFINISHED_DISCARD = 2,
};

typedef int32_t halfbyte_nonfinite;
enum {
  HALFBYTE_NONFINITE_ERROR = 0,
  HALFBYTE_NONFINITE_KEEP_DENSE = 1,
};

/* A field that is HALFBYTE_UNSET (group_size: 0) has the default of the layout. The defaults: nf4, verified,
 * on all threads of the CPU. */
typedef struct halfbyte_quantize_options {
  size_t struct_size;
  halfbyte_format format;
  int32_t asymmetric;   /* flag */
  int32_t double_quant; /* flag */
  halfbyte_layout layout;
  halfbyte_granularity granularity;
  halfbyte_scale_rule scale_rule;
  int64_t group_size;
  halfbyte_dtype scale_dtype;
  halfbyte_nonfinite nonfinite;
  const char* const* include; /* ECMAScript regular expressions without back-references; NULL where
                                num_include is 0 */
  int64_t num_include;
  const char* const* exclude;
  int64_t num_exclude;
  int32_t fallback_dense;  /* flag: what the layout cannot hold stays dense */
  int32_t dry_run;         /* flag: plan and report only */
  int32_t verify;          /* flag */
  int32_t force;           /* flag: replace an existing output */
  halfbyte_reader reader;  /* HALFBYTE_UNSET: that of the layout */
  int32_t force_layout;    /* flag: include may select what the reader cannot load */
  int32_t keep_embeddings; /* flag: embeddings and head stay dense, which mlx-lm quantizes */
  const DLDevice* devices; /* that compute, side by side; NULL where num_devices is 0: the CPU */
  int64_t num_devices;
  int64_t num_threads;                 /* of the CPU; 0: all */
  halfbyte_progress_function progress; /* may be NULL */
  void* user_data;
  float table[16];      /* lut4 */
  uint64_t shard_bytes; /* of a directory: at most so many in an output file; 0: the files of the input */
  const char*
      importance;     /* with search: a file, as QuantizeOptions in halfbyte/checkpoint.hpp has it, or NULL */
  int64_t search;     /* flag: as in halfbyte_encoding */
  int64_t unfinished; /* halfbyte_unfinished */
  int64_t choose_devices; /* flag: as in QuantizeOptions */
} halfbyte_quantize_options;
HALFBYTE_API halfbyte_status halfbyte_quantize_options_init(halfbyte_quantize_options* options,
                                                            size_t struct_size);

typedef struct halfbyte_dequantize_options {
  size_t struct_size;
  halfbyte_dtype dtype;    /* HALFBYTE_UNSET: the dtype that each weight had before */
  int32_t dry_run;         /* flag */
  int32_t force;           /* flag */
  const DLDevice* devices; /* as above */
  int64_t num_devices;
  int64_t num_threads;
  halfbyte_progress_function progress; /* may be NULL */
  void* user_data;
  uint64_t shard_bytes; /* as above */
  int64_t unfinished;   /* halfbyte_unfinished */
} halfbyte_dequantize_options;
HALFBYTE_API halfbyte_status halfbyte_dequantize_options_init(halfbyte_dequantize_options* options,
                                                              size_t struct_size);

/* ExpertForm in halfbyte/checkpoint.hpp. */
typedef int32_t halfbyte_expert_form;
enum {
  HALFBYTE_EXPERTS_PER_EXPERT = 0,
  HALFBYTE_EXPERTS_PARAMETRIZE = 1,
  HALFBYTE_EXPERTS_EXPERTS4BIT = 2,
};

/* ConvertOptions in halfbyte/checkpoint.hpp describes the fields. */
typedef struct halfbyte_convert_options {
  size_t struct_size;
  halfbyte_layout layout; /* of the output */
  halfbyte_reader reader; /* HALFBYTE_UNSET: by layout */
  int32_t requantize;     /* flag, like the next four */
  int32_t dry_run;
  int32_t force_layout;
  int32_t verify;
  int32_t force;
  int64_t num_threads;
  uint64_t shard_bytes;
  halfbyte_progress_function progress; /* may be NULL */
  void* user_data;
  int64_t experts;    /* halfbyte_expert_form of layout bitsandbytes; HALFBYTE_UNSET: as they are */
  int64_t unfinished; /* halfbyte_unfinished */
} halfbyte_convert_options;
HALFBYTE_API halfbyte_status halfbyte_convert_options_init(halfbyte_convert_options* options,
                                                           size_t struct_size);

typedef struct halfbyte_report halfbyte_report;
/* Reads `input` and writes `output`: file to file, directory to directory. A failure leaves no output.
 * options: NULL means the defaults. report: receives what happened; may be NULL. */
HALFBYTE_API halfbyte_status halfbyte_quantize_checkpoint(const char* input, const char* output,
                                                          const halfbyte_quantize_options* options,
                                                          halfbyte_report** report);
HALFBYTE_API halfbyte_status halfbyte_dequantize_checkpoint(const char* input, const char* output,
                                                            const halfbyte_dequantize_options* options,
                                                            halfbyte_report** report);

/* A checkpoint of weights that are given: CheckpointWriter in halfbyte/checkpoint.hpp. */
typedef struct halfbyte_writer halfbyte_writer;
typedef struct halfbyte_writer_options {
  size_t struct_size;
  const char* base;       /* whose other weights and files the output has too; NULL: there is none */
  const char* config;     /* the text of config.json; NULL: that of base */
  halfbyte_layout layout; /* of the quantized weights */
  halfbyte_reader reader; /* HALFBYTE_UNSET: that of the layout */
  int32_t force_layout;   /* flag */
  int32_t verify;         /* flag */
  int32_t force;          /* flag: replace an existing output */
  uint64_t shard_bytes;
  int64_t num_threads;
  halfbyte_progress_function progress; /* may be NULL */
  void* user_data;
  int64_t experts4bit;  /* flag */
  const char* identity; /* as WriterOptions in halfbyte/checkpoint.hpp has it; NULL: none */
  int64_t unfinished;   /* halfbyte_unfinished: with an identity */
} halfbyte_writer_options;
/* Layout halfbyte, verified. */
HALFBYTE_API halfbyte_status halfbyte_writer_options_init(halfbyte_writer_options* options,
                                                          size_t struct_size);
/* options: NULL means the defaults. */
HALFBYTE_API halfbyte_status halfbyte_writer_create(const char* output,
                                                    const halfbyte_writer_options* options,
                                                    halfbyte_writer** writer);
/* A weight of the output. Quantized: shares the memory, which must not change before the writer has finished.
 * Dense: copied. */
HALFBYTE_API halfbyte_status halfbyte_writer_set(halfbyte_writer* writer, const char* name,
                                                 const halfbyte_quantized_weight* weight);
HALFBYTE_API halfbyte_status halfbyte_writer_set_dense(halfbyte_writer* writer, const char* name,
                                                       const DLTensor* dense);
/* Writes all; once. report: receives what happened; may be NULL. */
HALFBYTE_API halfbyte_status halfbyte_writer_finish(halfbyte_writer* writer, halfbyte_report** report);
/* NULL is fine. */
HALFBYTE_API void halfbyte_writer_destroy(halfbyte_writer* writer);

/* Writes the quantized weights in another layout, with the codes that they have. */
HALFBYTE_API halfbyte_status halfbyte_convert_checkpoint(const char* input, const char* output,
                                                         const halfbyte_convert_options* options,
                                                         halfbyte_report** report);
/* NULL is fine. */
HALFBYTE_API void halfbyte_report_destroy(halfbyte_report* report);

/* What it points to lives as long as the report. */
typedef struct halfbyte_report_info {
  size_t struct_size;
  const char* input;
  const char* output;
  halfbyte_layout layout; /* of the output (quantize) or the input (dequantize); HALFBYTE_UNSET: none */
  int64_t num_devices;    /* that computed */
  halfbyte_reader reader; /* of quantize: what the output is for */
  int64_t num_weights;
  int64_t num_quantized;
  int64_t num_copied_files; /* of a directory */
  int64_t num_skipped_files;
  uint64_t source_bytes, output_bytes; /* of tensors */
  uint64_t quantized_source_bytes;
  uint64_t peak_buffer_bytes; /* upper bound of the working memory on the host, as planned */
  double run_seconds, sync_seconds, verify_seconds;
  const char* architecture;  /* that the weights were selected by; "": config.json names none that is known */
  int64_t num_readers;       /* that read the layout */
  int64_t num_left_out;      /* weights of the input that the reader does not load */
  int64_t num_resumed_files; /* with tensors, that an earlier run had completed */
  double read_seconds, write_seconds, compute_seconds; /* of run_seconds, on all workers together */
  const char* bottleneck;  /* "read", "copy", "compute", "write", "verify" or "sync"; "": nothing was run */
  double total_seconds;    /* of quantize and dequantize; a dry run of quantize estimates all times */
  const char* time_note;   /* of a dry run: what was not measured, and why; "": nothing */
  double copy_seconds;     /* of run_seconds, to CUDA devices and back */
  const char* device_note; /* why choose_devices took no CUDA device; "": it did */
} halfbyte_report_info;
HALFBYTE_API halfbyte_status halfbyte_report_get_info(const halfbyte_report* report,
                                                      halfbyte_report_info* info);

/* One of those that computed. */
HALFBYTE_API halfbyte_status halfbyte_report_get_device(const halfbyte_report* report, int64_t index,
                                                        DLDevice* device);

/* The name of a weight that was left out; NULL outside of them. */
HALFBYTE_API const char* halfbyte_report_left_out(const halfbyte_report* report, int64_t index);

/* Whether a reader loads the output, by the rules that are known of it. */
typedef struct halfbyte_reader_verdict {
  size_t struct_size;
  halfbyte_reader reader;
  const char* why_not; /* "": it does; lives as long as the report */
} halfbyte_reader_verdict;
HALFBYTE_API halfbyte_status halfbyte_report_get_reader(const halfbyte_report* report, int64_t index,
                                                        halfbyte_reader_verdict* verdict);

/* What happened (or would happen) to one weight. What it points to lives as long as the report. */
typedef struct halfbyte_weight_report {
  size_t struct_size;
  const char* name;
  const int64_t* shape;
  int64_t ndim;
  const char* dtype;  /* of the source, as stored: "BF16" */
  const char* reason; /* why it stayed dense; "" if quantized */
  const char* note;   /* "scales in f32: f16 cannot hold them"; "" where there is none */
  int32_t quantized;  /* flag */
  int32_t measured;   /* flag: the errors were measured; otherwise they are 0 */
  uint64_t source_bytes, output_bytes;
  double bits_per_weight;
  double max_error; /* largest |x_hat - x| */
  int64_t max_error_index;
  double relative_rmse; /* sqrt(sum (x_hat - x)^2 / sum x^2) */
  double snr_db;        /* infinite where exact */
  int64_t scale_rows;   /* as in halfbyte_weight */
} halfbyte_weight_report;
HALFBYTE_API halfbyte_status halfbyte_report_get_weight(const halfbyte_report* report, int64_t index,
                                                        halfbyte_weight_report* weight);
/* Of a weight that was quantized. */
HALFBYTE_API halfbyte_status halfbyte_report_get_spec(const halfbyte_report* report, int64_t index,
                                                      halfbyte_quant_spec* spec);
HALFBYTE_API halfbyte_status halfbyte_report_get_encoding(const halfbyte_report* report, int64_t index,
                                                          halfbyte_encoding* encoding);
/* Names of the files of a directory that were copied, and that were skipped. NULL for an index out of range.
 */
HALFBYTE_API const char* halfbyte_report_copied_file(const halfbyte_report* report, int64_t index);
HALFBYTE_API const char* halfbyte_report_skipped_file(const halfbyte_report* report, int64_t index);

typedef struct halfbyte_compare_options {
  size_t struct_size;
  int64_t num_threads;                 /* 0: all */
  halfbyte_progress_function progress; /* may be NULL */
  void* user_data;
} halfbyte_compare_options;
HALFBYTE_API halfbyte_status halfbyte_compare_options_init(halfbyte_compare_options* options,
                                                           size_t struct_size);

typedef struct halfbyte_comparison halfbyte_comparison;
/* Compares the decoded weights of two checkpoints; `a` is the reference. Rows with a problem come first, then
 * the others with the worst signal-to-noise ratio first. options: NULL means the defaults. */
HALFBYTE_API halfbyte_status halfbyte_compare_checkpoints(const char* a, const char* b,
                                                          const halfbyte_compare_options* options,
                                                          halfbyte_comparison** comparison);
/* NULL is fine. */
HALFBYTE_API void halfbyte_comparison_destroy(halfbyte_comparison* comparison);
HALFBYTE_API halfbyte_status halfbyte_comparison_num_rows(const halfbyte_comparison* comparison,
                                                          int64_t* num_rows);
/* What it points to lives as long as the comparison. */
typedef struct halfbyte_comparison_row {
  size_t struct_size;
  const char* name;
  const char* problem; /* "missing in B"; "" where compared */
  double max_error;
  int64_t max_error_index;
  double relative_rmse;
  double snr_db;
} halfbyte_comparison_row;
HALFBYTE_API halfbyte_status halfbyte_comparison_get_row(const halfbyte_comparison* comparison, int64_t index,
                                                         halfbyte_comparison_row* row);

/* ---- Checking and mending: halfbyte/verify.hpp. docs/verify.md has the rules. */

typedef struct halfbyte_verify_options {
  size_t struct_size;
  halfbyte_progress_function progress; /* may be NULL */
  void* user_data;
} halfbyte_verify_options;
HALFBYTE_API halfbyte_status halfbyte_verify_options_init(halfbyte_verify_options* options,
                                                          size_t struct_size);

typedef struct halfbyte_verification halfbyte_verification;
/* Finds the faults of a quantized checkpoint, which are no failure of the call. options: NULL means the
 * defaults. */
HALFBYTE_API halfbyte_status halfbyte_verify_checkpoint(const char* path,
                                                        const halfbyte_verify_options* options,
                                                        halfbyte_verification** verification);
/* NULL is fine. */
HALFBYTE_API void halfbyte_verification_destroy(halfbyte_verification* verification);
/* 0: the checkpoint keeps the rules. */
HALFBYTE_API halfbyte_status halfbyte_verification_num_faults(const halfbyte_verification* verification,
                                                              int64_t* num_faults);
/* What it points to lives as long as the verification. */
typedef struct halfbyte_fault {
  size_t struct_size;
  const char* rule; /* "global-scale-mismatch" */
  const char* name; /* of the tensor, module or file */
  const char* text; /* what is wrong, with the values */
} halfbyte_fault;
/* Faults are in order of rule and name. */
HALFBYTE_API halfbyte_status halfbyte_verification_get_fault(const halfbyte_verification* verification,
                                                             int64_t index, halfbyte_fault* fault);

typedef struct halfbyte_repair_options {
  size_t struct_size;
  int32_t force;                       /* flag: replaces an output that exists */
  halfbyte_progress_function progress; /* may be NULL */
  void* user_data;
} halfbyte_repair_options;
HALFBYTE_API halfbyte_status halfbyte_repair_options_init(halfbyte_repair_options* options,
                                                          size_t struct_size);

typedef struct halfbyte_repair halfbyte_repair;
/* Writes a copy of `input` in which weights of one product have one global scale. HALFBYTE_USAGE where there
 * is nothing to mend. A failure leaves no output. options: NULL means the defaults. repair: receives what
 * changed; may be NULL. */
HALFBYTE_API halfbyte_status halfbyte_repair_checkpoint(const char* input, const char* output,
                                                        const halfbyte_repair_options* options,
                                                        halfbyte_repair** repair);
/* NULL is fine. */
HALFBYTE_API void halfbyte_repair_destroy(halfbyte_repair* repair);
HALFBYTE_API halfbyte_status halfbyte_repair_num_weights(const halfbyte_repair* repair, int64_t* num_weights);
/* What it points to lives as long as the repair. The scales of groups are divided by a global scale. */
typedef struct halfbyte_repaired_weight {
  size_t struct_size;
  const char* name;
  float global_scale_before, global_scale;
  int64_t num_scales; /* of groups, which were rounded anew */
} halfbyte_repaired_weight;
HALFBYTE_API halfbyte_status halfbyte_repair_get_weight(const halfbyte_repair* repair, int64_t index,
                                                        halfbyte_repaired_weight* weight);

/* ---- The machine: halfbyte/system.hpp and halfbyte/device.hpp. Nothing here needs the CUDA toolkit. */

/* What it points to lives as long as the process. */
typedef struct halfbyte_system_info {
  size_t struct_size;
  const char* version;
  const char* simd_target;      /* what CPU kernels use on this machine: "AVX3_DL" */
  const char* compiled_targets; /* what this build has kernels for, best first: "AVX3_DL AVX2 SCALAR" */
  int64_t num_threads;          /* the default of operations */
} halfbyte_system_info;
HALFBYTE_API halfbyte_status halfbyte_get_system_info(halfbyte_system_info* info);

typedef struct halfbyte_cuda halfbyte_cuda;
/* Finds out what this machine has of CUDA. Finding nothing is not a failure. */
HALFBYTE_API halfbyte_status halfbyte_cuda_query(halfbyte_cuda** cuda);
/* NULL is fine. */
HALFBYTE_API void halfbyte_cuda_destroy(halfbyte_cuda* cuda);

/* What it points to lives as long as the halfbyte_cuda. */
typedef struct halfbyte_cuda_info {
  size_t struct_size;
  const char* problem;     /* why no device can be used; "" if one can */
  const char* driver_path; /* "" if not found */
  const char* nvrtc_path;
  int32_t driver_version; /* the CUDA version that the driver supports: 1000 * major + 10 * minor */
  int32_t nvrtc_version;
  const char* cache_directory; /* of compiled kernels on disk; "" if none is used */
  const char* cache_problem;   /* why none is used */
  int64_t num_devices;
} halfbyte_cuda_info;
HALFBYTE_API halfbyte_status halfbyte_cuda_get_info(const halfbyte_cuda* cuda, halfbyte_cuda_info* info);

typedef struct halfbyte_cuda_device {
  size_t struct_size;
  const char* name;    /* "NVIDIA H200" */
  const char* target;  /* what kernels are compiled for: "sm_90a"; "" if NVRTC cannot */
  const char* problem; /* why it cannot be used; "" if it can */
  int32_t index;
  int32_t capability; /* 10 * major + minor */
  int32_t num_multiprocessors;
  uint64_t memory_bytes;
} halfbyte_cuda_device;
HALFBYTE_API halfbyte_status halfbyte_cuda_get_device(const halfbyte_cuda* cuda, int64_t index,
                                                      halfbyte_cuda_device* device);

/* HALFBYTE_DEVICE, with the reason, if the device cannot be used. The CPU always can. */
HALFBYTE_API halfbyte_status halfbyte_check_device(DLDevice device);

/* A stream of a CUDA device. For the CPU it does nothing. */
typedef struct halfbyte_stream halfbyte_stream;
HALFBYTE_API halfbyte_status halfbyte_stream_create(DLDevice device, halfbyte_stream** stream);
/* The `stream` of other functions; NULL for the CPU. */
HALFBYTE_API void* halfbyte_stream_handle(const halfbyte_stream* stream);
/* Waits until all work is done. HALFBYTE_DEVICE if something failed. */
HALFBYTE_API halfbyte_status halfbyte_stream_synchronize(const halfbyte_stream* stream);
/* NULL is fine. Work on it must be done. */
HALFBYTE_API void halfbyte_stream_destroy(halfbyte_stream* stream);

/* Memory of a device: uninitialized, at least 256-byte aligned. */
typedef struct halfbyte_memory halfbyte_memory;
HALFBYTE_API halfbyte_status halfbyte_memory_create(DLDevice device, int64_t num_bytes,
                                                    halfbyte_memory** memory);
/* Page-locked host memory, which copies to and from `device` use asynchronously. */
HALFBYTE_API halfbyte_status halfbyte_memory_create_host(DLDevice device, int64_t num_bytes,
                                                         halfbyte_memory** memory);
HALFBYTE_API void* halfbyte_memory_data(const halfbyte_memory* memory);
/* NULL is fine. Work on it must be done. */
HALFBYTE_API void halfbyte_memory_destroy(halfbyte_memory* memory);
/* Copies between host memory and memory of `device`, in either direction, or within the device. On a CUDA
 * device the copy is enqueued on the stream. */
HALFBYTE_API halfbyte_status halfbyte_copy(DLDevice device, void* to, const void* from, int64_t num_bytes,
                                           void* stream);

/* ---- Kernels: halfbyte/kernels.hpp. Nothing here needs a GPU. Functions that compile need NVRTC. */

/* Its pointers are valid as long as the process lives, as are those of keys and targets. */
typedef struct halfbyte_kernel {
  size_t struct_size;
  const char* op;   /* "quantize" */
  const char* name; /* "quantize_groups": the extern "C" function */
  const char* description;
  int64_t num_keys;
  const char* target; /* the only target that it is for: "sm_90a"; empty: any target */
  int64_t plain;      /* flag: halfbyte_kernel_describe tells its parameters */
} halfbyte_kernel;
HALFBYTE_API halfbyte_status halfbyte_kernel_count(int64_t* num_kernels);
HALFBYTE_API halfbyte_status halfbyte_kernel_get(int64_t index, halfbyte_kernel* kernel);

/* A property that a kernel is specialised on. */
typedef struct halfbyte_kernel_key {
  size_t struct_size;
  const char* name; /* "group-size" */
  const char* description;
  int64_t num_values; /* the first is the default */
  int64_t open;       /* flag: other values are taken too */
} halfbyte_kernel_key;
HALFBYTE_API halfbyte_status halfbyte_kernel_get_key(int64_t kernel_index, int64_t key_index,
                                                     halfbyte_kernel_key* key);
/* NULL for indices out of range. */
HALFBYTE_API const char* halfbyte_kernel_key_value(int64_t kernel_index, int64_t key_index,
                                                   int64_t value_index);

/* A configuration is an array of these. A missing key has its default. This structure will not change. */
typedef struct halfbyte_kernel_setting {
  const char* key;
  const char* value;
} halfbyte_kernel_setting;
/* The index of the kernel of the op for this configuration: the plain one if it takes the configuration. */
HALFBYTE_API halfbyte_status halfbyte_kernel_choose(const char* op, const halfbyte_kernel_setting* settings,
                                                    int64_t num_settings, int64_t* index);
/* What a plain kernel is given and how it is launched, as JSON (docs/kernels.md); the text ends with a zero
 * byte that its size does not count. HALFBYTE_USAGE for kernels that are not plain. */
HALFBYTE_API halfbyte_status halfbyte_kernel_describe(const char* kernel,
                                                      const halfbyte_kernel_setting* settings,
                                                      int64_t num_settings, halfbyte_blob** json);

/* The targets that the NVRTC of this machine compiles for. HALFBYTE_DEVICE without NVRTC. */
HALFBYTE_API halfbyte_status halfbyte_kernel_target_count(int64_t* num_targets);
HALFBYTE_API halfbyte_status halfbyte_kernel_target_get(int64_t index, const char** target);

/* One module with one kernel: PTX as text, or the machine code of the target ("sm_90a"). */
HALFBYTE_API halfbyte_status halfbyte_kernel_emit_ptx(const char* kernel,
                                                      const halfbyte_kernel_setting* settings,
                                                      int64_t num_settings, const char* target,
                                                      halfbyte_blob** ptx);
HALFBYTE_API halfbyte_status halfbyte_kernel_emit_cubin(const char* kernel,
                                                        const halfbyte_kernel_setting* settings,
                                                        int64_t num_settings, const char* target,
                                                        halfbyte_blob** cubin);

/* Called after each kernel. A result other than 0 cancels: HALFBYTE_CANCELLED, and no file. */
typedef int (*halfbyte_kernel_progress_function)(int64_t num_done, int64_t num_total, void* user_data);
/* What a kernel pack contains. A pack is a file of compiled kernels, which takes the place of NVRTC. A list
 * with number 0 is NULL and means all; targets has at least one. */
typedef struct halfbyte_kernel_pack_options {
  size_t struct_size;
  const char* const* targets;
  int64_t num_targets;
  const char* const* ops;
  int64_t num_ops;
  const char* const* formats;
  int64_t num_formats;
  const char* const* dtypes;
  int64_t num_dtypes;
  int32_t force;             /* flag: replace an existing file */
  int32_t shard, num_shards; /* every num_shards-th kernel, from number `shard` on; by default all */
  halfbyte_kernel_progress_function progress; /* may be NULL */
  void* user_data;
} halfbyte_kernel_pack_options;
HALFBYTE_API halfbyte_status halfbyte_kernel_pack_options_init(halfbyte_kernel_pack_options* options,
                                                               size_t struct_size);
/* How many kernels a pack of these options holds. */
HALFBYTE_API halfbyte_status halfbyte_kernel_pack_count(const halfbyte_kernel_pack_options* options,
                                                        int64_t* num_kernels);

typedef struct halfbyte_kernel_pack_info {
  size_t struct_size;
  int64_t num_kernels;
  int64_t num_compiled; /* _write: the others were in packs that are loaded. _load: 0 */
  int64_t num_matching; /* _load: made from the sources of this library. _write: all */
  uint64_t num_bytes;   /* _write: of the file. _load: 0 */
} halfbyte_kernel_pack_info;
/* Writes the file complete or not at all. info: may be NULL. */
HALFBYTE_API halfbyte_status halfbyte_kernel_pack_write(const char* path,
                                                        const halfbyte_kernel_pack_options* options,
                                                        halfbyte_kernel_pack_info* info);
/* Loads a pack: from now on, kernels are looked for in it before they are compiled. A pack is machine code:
 * do not load one that somebody else could have written. info: may be NULL. */
HALFBYTE_API halfbyte_status halfbyte_kernel_pack_load(const char* path, halfbyte_kernel_pack_info* info);

#ifdef __cplusplus
}
#endif

#endif
