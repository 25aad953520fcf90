/* An OpenCL library in front of the real one (OPENCL_REAL): it lists the calls in the file OPENCL_LOG, and lets the
   call number OPENCL_FAIL_AT (from 1) of the function OPENCL_FAIL, and all later ones, fail with OPENCL_CODE. */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "opencl_api.h"

static void *real(const char *name)
{
    static void *library;
    library = library != NULL ? library : dlopen(getenv("OPENCL_REAL"), RTLD_NOW);
    return dlsym(library, name);
}

/* The code to fail with, or 0. */
static cl_int noted(const char *name, size_t bytes)
{
    static int seen;
    FILE *log = fopen(getenv("OPENCL_LOG"), "a");
    fprintf(log, "%s %lu\n", name, (unsigned long)bytes);
    fclose(log);
    const char *wanted = getenv("OPENCL_FAIL");
    if (wanted == NULL || strcmp(wanted, name) != 0 || ++seen < atoi(getenv("OPENCL_FAIL_AT"))) {
        return 0;
    }
    return atoi(getenv("OPENCL_CODE"));
}

#define FORWARD(name, bytes, parameters, arguments) \
    cl_int name parameters \
    { \
        const cl_int code = noted(#name, bytes); \
        cl_int (*function) parameters; \
        void *symbol = real(#name); \
        memcpy(&function, &symbol, sizeof symbol); \
        return code != 0 ? code : function arguments; \
    }

FORWARD(clEnqueueWriteBuffer, bytes,
        (cl_command_queue q, cl_mem m, cl_uint b, size_t o, size_t bytes, const void *p, cl_uint n, const cl_event *w,
         cl_event *e),
        (q, m, b, o, bytes, p, n, w, e))
FORWARD(clEnqueueReadBuffer, bytes,
        (cl_command_queue q, cl_mem m, cl_uint b, size_t o, size_t bytes, void *p, cl_uint n, const cl_event *w,
         cl_event *e),
        (q, m, b, o, bytes, p, n, w, e))
FORWARD(clEnqueueNDRangeKernel, 0,
        (cl_command_queue q, cl_kernel k, cl_uint d, const size_t *o, const size_t *i, const size_t *g, cl_uint n,
         const cl_event *w, cl_event *e),
        (q, k, d, o, i, g, n, w, e))
FORWARD(clSetKernelArg, bytes, (cl_kernel k, cl_uint i, size_t bytes, const void *p), (k, i, bytes, p))
FORWARD(clBuildProgram, 0,
        (cl_program p, cl_uint n, const cl_device_id *d, const char *t, void (*f)(cl_program, void *), void *u),
        (p, n, d, t, f, u))

/* A kernel that ended with an error: the call that asks succeeds, the status is the code. */
cl_int clGetEventInfo(cl_event event, cl_uint name, size_t bytes, void *value, size_t *more)
{
    const cl_int code = noted("clGetEventInfo", bytes);
    cl_int (*function)(cl_event, cl_uint, size_t, void *, size_t *);
    void *symbol = real("clGetEventInfo");
    memcpy(&function, &symbol, sizeof symbol);
    const cl_int answer = function(event, name, bytes, value, more);
    if (code != 0) {
        memcpy(value, &code, sizeof code);
    }
    return answer;
}

cl_mem clCreateBuffer(cl_context context, cl_bitfield flags, size_t bytes, void *host, cl_int *error)
{
    const cl_int code = noted("clCreateBuffer", bytes);
    cl_mem (*function)(cl_context, cl_bitfield, size_t, void *, cl_int *);
    void *symbol = real("clCreateBuffer");
    memcpy(&function, &symbol, sizeof symbol);
    if (code != 0) {
        *error = code;
        return NULL;
    }
    return function(context, flags, bytes, host, error);
}
