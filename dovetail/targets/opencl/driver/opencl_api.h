/* The part of the OpenCL 1.2 interface the runtime uses, so that no headers of a vendor's are needed.

   Source of the facts: the OpenCL specification of the Khronos group and its published constants. */
#ifndef OPENCL_API_H
#define OPENCL_API_H

#include <stddef.h>
#include <stdint.h>

typedef int32_t cl_int;
typedef uint32_t cl_uint;
typedef uint64_t cl_bitfield;
typedef struct _cl_platform_id *cl_platform_id;
typedef struct _cl_device_id *cl_device_id;
typedef struct _cl_context *cl_context;
typedef struct _cl_command_queue *cl_command_queue;
typedef struct _cl_program *cl_program;
typedef struct _cl_kernel *cl_kernel;
typedef struct _cl_mem *cl_mem;
typedef struct _cl_event *cl_event;

typedef struct {
    size_t origin;
    size_t size;
} cl_buffer_region;

#define CL_SUCCESS 0
#define CL_OUT_OF_RESOURCES -5
#define CL_TRUE 1u
#define CL_DEVICE_TYPE_ALL 0xFFFFFFFFu
#define CL_DEVICE_NAME 0x102Bu
#define CL_MEM_READ_WRITE 1u
#define CL_MEM_READ_ONLY 4u
#define CL_MEM_COPY_HOST_PTR 32u
#define CL_BUFFER_CREATE_TYPE_REGION 0x1220u
#define CL_PROGRAM_BUILD_LOG 0x1183u
#define CL_EVENT_COMMAND_EXECUTION_STATUS 0x11D3u
#define CL_QUEUE_PROFILING_ENABLE 2u
#define CL_PROFILING_COMMAND_START 0x1282u
#define CL_PROFILING_COMMAND_END 0x1283u

/* F(result, name, parameters) for every function. */
#define OPENCL_FUNCTIONS(F) \
    F(cl_int, clGetPlatformIDs, (cl_uint, cl_platform_id *, cl_uint *)) \
    F(cl_int, clGetDeviceIDs, (cl_platform_id, cl_bitfield, cl_uint, cl_device_id *, cl_uint *)) \
    F(cl_int, clGetDeviceInfo, (cl_device_id, cl_uint, size_t, void *, size_t *)) \
    F(cl_context, clCreateContext, (const intptr_t *, cl_uint, const cl_device_id *, \
                                    void (*)(const char *, const void *, size_t, void *), void *, cl_int *)) \
    F(cl_command_queue, clCreateCommandQueue, (cl_context, cl_device_id, cl_bitfield, cl_int *)) \
    F(cl_program, clCreateProgramWithSource, (cl_context, cl_uint, const char **, const size_t *, cl_int *)) \
    F(cl_program, clCreateProgramWithBinary, (cl_context, cl_uint, const cl_device_id *, const size_t *, \
                                              const unsigned char **, cl_int *, cl_int *)) \
    F(cl_int, clBuildProgram, (cl_program, cl_uint, const cl_device_id *, const char *, \
                               void (*)(cl_program, void *), void *)) \
    F(cl_int, clGetProgramBuildInfo, (cl_program, cl_device_id, cl_uint, size_t, void *, size_t *)) \
    F(cl_kernel, clCreateKernel, (cl_program, const char *, cl_int *)) \
    F(cl_int, clSetKernelArg, (cl_kernel, cl_uint, size_t, const void *)) \
    F(cl_mem, clCreateBuffer, (cl_context, cl_bitfield, size_t, void *, cl_int *)) \
    F(cl_mem, clCreateSubBuffer, (cl_mem, cl_bitfield, cl_uint, const void *, cl_int *)) \
    F(cl_int, clReleaseMemObject, (cl_mem)) \
    F(cl_int, clEnqueueWriteBuffer, (cl_command_queue, cl_mem, cl_uint, size_t, size_t, const void *, cl_uint, \
                                     const cl_event *, cl_event *)) \
    F(cl_int, clEnqueueReadBuffer, (cl_command_queue, cl_mem, cl_uint, size_t, size_t, void *, cl_uint, \
                                    const cl_event *, cl_event *)) \
    F(cl_int, clEnqueueNDRangeKernel, (cl_command_queue, cl_kernel, cl_uint, const size_t *, const size_t *, \
                                       const size_t *, cl_uint, const cl_event *, cl_event *)) \
    F(cl_int, clFinish, (cl_command_queue)) \
    F(cl_int, clGetEventInfo, (cl_event, cl_uint, size_t, void *, size_t *)) \
    F(cl_int, clGetEventProfilingInfo, (cl_event, cl_uint, size_t, void *, size_t *)) \
    F(cl_int, clReleaseEvent, (cl_event))

/* F(code) for the errors those functions return. */
#define OPENCL_ERRORS(F) \
    F(DEVICE_NOT_FOUND, -1) F(DEVICE_NOT_AVAILABLE, -2) F(COMPILER_NOT_AVAILABLE, -3) \
    F(MEM_OBJECT_ALLOCATION_FAILURE, -4) F(OUT_OF_RESOURCES, -5) F(OUT_OF_HOST_MEMORY, -6) \
    F(PROFILING_INFO_NOT_AVAILABLE, -7) F(BUILD_PROGRAM_FAILURE, -11) F(MISALIGNED_SUB_BUFFER_OFFSET, -13) \
    F(EXEC_STATUS_ERROR_FOR_EVENTS_IN_WAIT_LIST, -14) F(INVALID_VALUE, -30) F(INVALID_DEVICE, -33) \
    F(INVALID_CONTEXT, -34) F(INVALID_QUEUE_PROPERTIES, -35) F(INVALID_COMMAND_QUEUE, -36) \
    F(INVALID_MEM_OBJECT, -38) F(INVALID_BINARY, -42) \
    F(INVALID_PROGRAM, -44) F(INVALID_PROGRAM_EXECUTABLE, -45) F(INVALID_KERNEL_NAME, -46) \
    F(INVALID_KERNEL, -48) F(INVALID_ARG_INDEX, -49) F(INVALID_ARG_VALUE, -50) F(INVALID_ARG_SIZE, -51) \
    F(INVALID_KERNEL_ARGS, -52) F(INVALID_WORK_GROUP_SIZE, -54) F(INVALID_WORK_ITEM_SIZE, -55) \
    F(INVALID_EVENT, -58) F(INVALID_BUFFER_SIZE, -61) F(PLATFORM_NOT_FOUND_KHR, -1001)

#endif
