/* halfbyte from C99: a flat buffer to INT4, a plan, a checkpoint, and what errors look like.
 *   halfbyte_c MODEL OUTPUT */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "halfbyte/halfbyte.h"

/* Ends the program where a call fails. */
static void check(halfbyte_status status) {
  if (status == HALFBYTE_OK) return;
  fprintf(stderr, "%s: %s\n", halfbyte_status_name(status), halfbyte_last_error());
  exit(status);
}

static const DLDevice kCpu = {kDLCPU, 0};

/* A contiguous tensor in host memory. */
static DLTensor tensor(void* data, uint8_t code, uint8_t bits, int32_t ndim, int64_t* shape) {
  DLTensor result;
  result.data = data;
  result.device = kCpu;
  result.ndim = ndim;
  result.dtype.code = code;
  result.dtype.bits = bits;
  result.dtype.lanes = 1;
  result.shape = shape;
  result.strides = NULL;
  result.byte_offset = 0;
  return result;
}

/* n values to 4 bits each and back; returns the largest error. */
static float flat_buffer(float* values, int64_t n) {
  const int64_t group_size = 32;
  int64_t num_groups = 0, num_bytes = 0, i;
  float* decoded = malloc((size_t)n * sizeof(float));
  float *scales, largest = 0;
  uint8_t* codes;
  DLTensor x, q, s, y;
  check(halfbyte_int4_num_groups(n, group_size, &num_groups));
  check(halfbyte_int4_packed_bytes(n, &num_bytes));
  scales = malloc((size_t)num_groups * sizeof(float));
  codes = malloc((size_t)num_bytes);
  if (!decoded || !scales || !codes) exit(HALFBYTE_NO_MEMORY);
  x = tensor(values, kDLFloat, 32, 1, &n);
  q = tensor(codes, kDLUInt, 8, 1, &num_bytes);
  s = tensor(scales, kDLFloat, 32, 1, &num_groups);
  y = tensor(decoded, kDLFloat, 32, 1, &n);
  check(halfbyte_quantize_int4(&x, &q, &s, NULL, n, group_size, 1, NULL));
  check(halfbyte_dequantize_int4(&q, &s, NULL, &y, n, group_size, 1, NULL));
  for (i = 0; i < n; ++i) largest = fmaxf(largest, fabsf(decoded[i] - values[i]));
  printf("int4: %d values in %d bytes and %d scales, largest error %.4f\n", (int)n, (int)num_bytes,
         (int)num_groups, (double)largest);
  free(decoded);
  free(scales);
  free(codes);
  return largest;
}

/* The rows of a matrix to int8 with given scales. */
static void plan(void) {
  int64_t shape[2] = {2, 4}, num_rows = 2, workspace_size = 0;
  float values[8] = {1, 2.5f, -1, 0, 10, 1000, -1000, 5}, scales[2] = {0.5f, 2};
  int8_t codes[8];
  DLTensor x = tensor(values, kDLFloat, 32, 2, shape), q = tensor(codes, kDLInt, 8, 2, shape);
  DLTensor s = tensor(scales, kDLFloat, 32, 1, &num_rows);
  halfbyte_linear_descriptor descriptor;
  halfbyte_quantize_linear_args args;
  halfbyte_quantize_status status;
  halfbyte_plan* quantize;
  halfbyte_memory* workspace;
  halfbyte_sku sku;
  int i;

  check(halfbyte_linear_descriptor_init(&descriptor, sizeof descriptor));
  descriptor.ndim = 2;
  descriptor.shape = shape;
  descriptor.granularity = HALFBYTE_GRANULARITY_CHANNEL;
  descriptor.axis = 0;
  descriptor.alignment = sizeof(float); /* of the arrays above */
  check(halfbyte_quantize_linear_select(kCpu, &descriptor, NULL, &quantize));
  sku.struct_size = sizeof sku;
  check(halfbyte_plan_sku(quantize, &sku));
  check(halfbyte_plan_workspace_size(quantize, &workspace_size));
  check(halfbyte_memory_create(kCpu, workspace_size, &workspace));

  check(halfbyte_quantize_linear_args_init(&args, sizeof args));
  args.x = &x;
  args.codes = &q;
  args.scale = &s;
  check(halfbyte_quantize_linear_run(quantize, NULL, halfbyte_memory_data(workspace), workspace_size, &args));
  status.struct_size = sizeof status;
  check(halfbyte_plan_status(quantize, NULL, halfbyte_memory_data(workspace), workspace_size, &status));
  printf("%s, %s, %s:", sku.kernel, sku.backend, sku.dtypes);
  for (i = 0; i < 8; ++i) printf(" %d", codes[i]);
  printf(", %d not finite\n", (int)status.num_nonfinite);
  halfbyte_memory_destroy(workspace);
  halfbyte_plan_destroy(quantize);
}

static int on_progress(const halfbyte_progress* progress, void* user_data) {
  ++*(int*)user_data;
  (void)progress;
  return 0; /* anything else cancels */
}

static void checkpoint(const char* model, const char* output) {
  halfbyte_quantize_options options;
  halfbyte_report* report;
  halfbyte_report_info info;
  halfbyte_weight_report weight;
  int64_t i;
  int calls = 0;
  check(halfbyte_quantize_options_init(&options, sizeof options));
  check(halfbyte_format_find("int4", &options.format));
  options.force = 1; /* replaces the output */
  options.progress = on_progress;
  options.user_data = &calls;
  check(halfbyte_quantize_checkpoint(model, output, &options, &report));
  info.struct_size = sizeof info;
  check(halfbyte_report_get_info(report, &info));
  for (i = 0; i < info.num_weights; ++i) {
    weight.struct_size = sizeof weight;
    check(halfbyte_report_get_weight(report, i, &weight));
    if (weight.quantized) break;
  }
  printf("%s: %d of %d weights quantized, layout %s, %d calls of progress; %s: %.2f dB\n", info.output,
         (int)info.num_quantized, (int)info.num_weights, halfbyte_layout_name(info.layout), calls,
         weight.name, weight.snr_db);
  halfbyte_report_destroy(report);
}

/* What fails returns a status and leaves a text. */
static void errors(void) {
  float values[4] = {1, 2, 3, NAN};
  uint8_t codes[2];
  int64_t n = 4, num_bytes = 2, one = 1;
  DLTensor x = tensor(values, kDLFloat, 32, 1, &n), q = tensor(codes, kDLUInt, 8, 1, &num_bytes);
  DLTensor s = tensor(values, kDLFloat, 32, 1, &one);
  halfbyte_checkpoint* none = NULL;
  halfbyte_format format;
  halfbyte_status status[4];
  char text[4][300];
  int i;
  status[0] = halfbyte_format_find("nf5", &format);
  snprintf(text[0], sizeof text[0], "%s", halfbyte_last_error());
  status[1] = halfbyte_quantize_nf4(&x, &q, &s, 5, 64, NULL);
  snprintf(text[1], sizeof text[1], "%s", halfbyte_last_error());
  status[2] = halfbyte_quantize_nf4(&x, &q, &s, 4, 64, NULL); /* scales lie in x */
  snprintf(text[2], sizeof text[2], "%s", halfbyte_last_error());
  status[3] = halfbyte_checkpoint_open("/no/such/model", &none);
  snprintf(text[3], sizeof text[3], "%s", halfbyte_last_error());
  for (i = 0; i < 4; ++i) {
    printf("%d %s: %s\n", (int)status[i], halfbyte_status_name(status[i]), text[i]);
    if (status[i] == HALFBYTE_OK) exit(1);
  }
}

int main(int argc, char** argv) {
  float values[129];
  int i;
  if (argc != 3) {
    fprintf(stderr, "usage: halfbyte_c MODEL OUTPUT\n");
    return HALFBYTE_USAGE;
  }
  printf("halfbyte %s, header %s\n", halfbyte_version_string(), HALFBYTE_VERSION_STRING);
  for (i = 0; i < 129; ++i) values[i] = sinf((float)(i * i));
  if (flat_buffer(values, 129) > 0.08f) return 1; /* half a step of a scale that is at most 1 / 7 */
  plan();
  checkpoint(argv[1], argv[2]);
  errors();
  return 0;
}
