#include "opencl.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MOST_STARTED 64 /* kernels between two moments at which their ends are looked at */
#define MOST_DEVICES 16
#define NAME_BYTES 256
#define MOST_PARTS 16 /* parts of the memory one kernel is given */
#define LOG_BYTES 16384

#ifdef DOVETAIL_OPENCL_LINKED
#define DECLARED(result, name, parameters) extern result name parameters;
OPENCL_FUNCTIONS(DECLARED)
#else
#include <dlfcn.h>
#define DECLARED(result, name, parameters) static result(*name) parameters;
OPENCL_FUNCTIONS(DECLARED)
#endif

const char *dovetail_layer = "the beginning";
uint32_t dovetail_layer_index;
uint64_t *dovetail_nanoseconds;

static const opencl_network *opened;
static cl_device_id device;
static cl_context context;
static cl_command_queue queue;
static cl_program program;
static cl_mem memory; /* the device's copy of the network's */
static uint32_t constants_known;
static cl_event started[MOST_STARTED];
static const char *started_by[MOST_STARTED];
static uint32_t started_for[MOST_STARTED];
static uint32_t started_count;
static cl_mem parts[MOST_PARTS]; /* of the kernel that is being started */
static uint32_t part_count;

static const char *error_name(cl_int code)
{
    switch (code) {
#define NAMED(name, value) case value: return "CL_" #name;
        OPENCL_ERRORS(NAMED)
    default: return "an error without a name here";
    }
}

static void fail(const char *call, const char *layer, cl_int code)
{
    fprintf(stderr, "dovetail: %s failed in %s: %s (%d)\n", call, layer, error_name(code), (int)code);
    exit(1);
}

static void check(const char *call, cl_int code)
{
    if (code != CL_SUCCESS) {
        fail(call, dovetail_layer, code);
    }
}

static void load(void)
{
#ifndef DOVETAIL_OPENCL_LINKED
    const char *wanted = getenv("DOVETAIL_OPENCL");
    const char *name = wanted != NULL && wanted[0] != '\0' ? wanted : "libOpenCL.so.1";
    void *library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    if (library == NULL) {
        fprintf(stderr, "dovetail: the OpenCL library cannot be loaded: %s; set DOVETAIL_OPENCL to its path\n",
                dlerror());
        exit(1);
    }
    void *symbol;
#define LOADED(result, function, parameters) \
    symbol = dlsym(library, #function); \
    if (symbol == NULL) { \
        fprintf(stderr, "dovetail: %s has no function %s\n", name, #function); \
        exit(1); \
    } \
    memcpy(&function, &symbol, sizeof symbol);
    OPENCL_FUNCTIONS(LOADED)
#endif
}

/* The first device whose name contains what DOVETAIL_OPENCL_DEVICE says. */
static void choose_device(void)
{
    cl_platform_id platforms[MOST_DEVICES];
    cl_device_id found[MOST_DEVICES];
    cl_uint platform_count = 0;
    const char *wanted = getenv("DOVETAIL_OPENCL_DEVICE");
    const cl_int answer = clGetPlatformIDs(MOST_DEVICES, platforms, &platform_count);
    if (answer != -1001) { /* there is none */
        check("clGetPlatformIDs", answer);
    }
    for (cl_uint i = 0; i < platform_count && i < MOST_DEVICES && device == NULL; ++i) {
        cl_uint count = 0;
        const cl_int code = clGetDeviceIDs(platforms[i], CL_DEVICE_TYPE_ALL, MOST_DEVICES, found, &count);
        if (code == -1) { /* a platform without devices */
            continue;
        }
        check("clGetDeviceIDs", code);
        for (cl_uint j = 0; j < count && j < MOST_DEVICES && device == NULL; ++j) {
            char name[NAME_BYTES] = "";
            check("clGetDeviceInfo", clGetDeviceInfo(found[j], CL_DEVICE_NAME, sizeof name - 1u, name, NULL));
            device = wanted == NULL || strstr(name, wanted) != NULL ? found[j] : NULL;
        }
    }
    if (device == NULL) {
        fprintf(stderr, "dovetail: there is no OpenCL device%s%s (%u platforms were found)\n",
                wanted != NULL ? " named " : "", wanted != NULL ? wanted : "", (unsigned)platform_count);
        exit(1);
    }
}

static void build(cl_program made, const char *what)
{
    const cl_int code = clBuildProgram(made, 1, &device, "", NULL, NULL);
    if (code != CL_SUCCESS) {
        static char log[LOG_BYTES];
        if (clGetProgramBuildInfo(made, device, CL_PROGRAM_BUILD_LOG, sizeof log - 1u, log, NULL) == CL_SUCCESS) {
            fprintf(stderr, "%s\n", log);
        }
        fail("clBuildProgram", what, code);
    }
}

void opencl_open(const opencl_network *network)
{
    if (opened != NULL) {
        return;
    }
    cl_int code;
    load();
    choose_device();
    context = clCreateContext(NULL, 1, &device, NULL, NULL, &code);
    check("clCreateContext", code);
    queue = clCreateCommandQueue(context, device, dovetail_nanoseconds != NULL ? CL_QUEUE_PROFILING_ENABLE : 0u, &code);
    check("clCreateCommandQueue", code);
    if (network->lines != 0u) {
        program = clCreateProgramWithSource(context, network->lines, network->source, NULL, &code);
        check("clCreateProgramWithSource", code);
        build(program, "the network's kernels");
    }
    memory = clCreateBuffer(context, CL_MEM_READ_WRITE, network->bytes, NULL, &code);
    check("clCreateBuffer", code);
    opened = network;
}

static size_t place_of(const uint8_t *first)
{
    return (size_t)(first - opened->memory);
}

/* Adds the time of a kernel that has ended to its layer's. */
static void add_time(cl_event event, uint32_t layer)
{
    uint64_t start, end;
    check("clGetEventProfilingInfo",
          clGetEventProfilingInfo(event, CL_PROFILING_COMMAND_START, sizeof start, &start, NULL));
    check("clGetEventProfilingInfo", clGetEventProfilingInfo(event, CL_PROFILING_COMMAND_END, sizeof end, &end, NULL));
    dovetail_nanoseconds[layer] += end - start;
}

/* After a call that waited for the kernels started so far: how they ended comes first, then how the call did. */
static void look_back(const char *call, cl_int code)
{
    for (uint32_t i = 0; i < started_count; ++i) {
        cl_int status = CL_SUCCESS;
        const cl_int known =
            clGetEventInfo(started[i], CL_EVENT_COMMAND_EXECUTION_STATUS, sizeof status, &status, NULL);
        if (known == CL_SUCCESS && status < 0) {
            fail("a kernel", started_by[i], status);
        }
        if (code == CL_SUCCESS) {
            check("clGetEventInfo", known);
            if (dovetail_nanoseconds != NULL) {
                add_time(started[i], started_for[i]);
            }
            check("clReleaseEvent", clReleaseEvent(started[i]));
        }
    }
    started_count = 0;
    check(call, code);
}

void opencl_to_device(const uint8_t *first, uint32_t bytes)
{
    check("clEnqueueWriteBuffer",
          clEnqueueWriteBuffer(queue, memory, CL_TRUE, place_of(first), bytes, first, 0, NULL, NULL));
}

void opencl_from_device(uint8_t *first, uint32_t bytes)
{
    look_back("clEnqueueReadBuffer",
              clEnqueueReadBuffer(queue, memory, CL_TRUE, place_of(first), bytes, first, 0, NULL, NULL));
}

static void load_binary(opencl_binary *binary)
{
    const unsigned char *bytes[1] = {binary->bytes};
    cl_int status = CL_SUCCESS, code;
    binary->program = clCreateProgramWithBinary(context, 1, &device, &binary->size, bytes, &status, &code);
    check("clCreateProgramWithBinary", code != CL_SUCCESS ? code : status);
    build(binary->program, binary->file);
}

void opencl_begin(opencl_kernel *kernel)
{
    kernel->arguments = 0;
    if (kernel->handle != NULL) {
        return;
    }
    if (kernel->binary != NULL && kernel->binary->program == NULL) {
        load_binary(kernel->binary);
    }
    cl_int code;
    kernel->handle = clCreateKernel(kernel->binary != NULL ? kernel->binary->program : program, kernel->name, &code);
    check("clCreateKernel", code);
}

static void set(opencl_kernel *kernel, size_t bytes, const void *value)
{
    check("clSetKernelArg", clSetKernelArg(kernel->handle, kernel->arguments, bytes, value));
    kernel->arguments++;
}

void opencl_memory(opencl_kernel *kernel)
{
    set(kernel, sizeof memory, &memory);
}

void opencl_offset(opencl_kernel *kernel, const uint8_t *first)
{
    opencl_number(kernel, (int32_t)place_of(first));
}

void opencl_part(opencl_kernel *kernel, const uint8_t *first, uint32_t bytes)
{
    const cl_buffer_region region = {place_of(first), bytes};
    cl_int code;
    if (part_count == MOST_PARTS) {
        fail("opencl_part", dovetail_layer, CL_OUT_OF_RESOURCES);
    }
    parts[part_count] = clCreateSubBuffer(memory, CL_MEM_READ_WRITE, CL_BUFFER_CREATE_TYPE_REGION, &region, &code);
    check("clCreateSubBuffer", code);
    set(kernel, sizeof(cl_mem), &parts[part_count++]);
}

void opencl_given(opencl_kernel *kernel, const uint8_t *constants, uint32_t bytes)
{
    uint32_t i = 0;
    while (i < constants_known && opened->constants[i].host != constants) {
        ++i;
    }
    if (i == constants_known) {
        cl_int code;
        uint8_t *source = (uint8_t *)(uintptr_t)constants; /* read, and copied at once */
        opened->constants[i].host = constants;
        opened->constants[i].device =
            clCreateBuffer(context, CL_MEM_READ_ONLY | CL_MEM_COPY_HOST_PTR, bytes, source, &code);
        check("clCreateBuffer", code);
        constants_known++;
    }
    set(kernel, sizeof(cl_mem), &opened->constants[i].device);
}

void opencl_number(opencl_kernel *kernel, int32_t number)
{
    set(kernel, sizeof number, &number);
}

void opencl_run(opencl_kernel *kernel, const size_t *items, const size_t *group)
{
    if (started_count == MOST_STARTED) {
        look_back("clFinish", clFinish(queue));
    }
    check("clEnqueueNDRangeKernel", clEnqueueNDRangeKernel(queue, kernel->handle, 3, NULL, items, group, 0, NULL,
                                                           &started[started_count]));
    started_for[started_count] = dovetail_layer_index;
    started_by[started_count++] = dovetail_layer;
    while (part_count > 0u) { /* the device keeps them until the kernel has ended */
        check("clReleaseMemObject", clReleaseMemObject(parts[--part_count]));
    }
}
