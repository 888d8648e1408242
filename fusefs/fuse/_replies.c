/* A thread that answers long READs with the bytes of files, without the interpreter lock: copying
 * the bytes is most of the cost of such a READ, and the event loop can do other work meanwhile.
 *
 * Only bytes in the page cache are sent. A READ is given back to Python if the page cache lacks
 * some of its bytes or the kernel refuses its reply. Replies are written from resident memory, as
 * in session.py. The mutex guards the ring of jobs; each job has a descriptor of its own. */

#define PY_SSIZE_T_CLEAN
#define _GNU_SOURCE
#include <Python.h>

#include <fcntl.h>
#include <linux/fuse.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <unistd.h>

enum { MOST_JOBS = 1024 }; /* as many as the kernel's background reads (session.py) */

struct job {
    unsigned long long unique, fh;
    long long offset;
    unsigned int size;
    int fd, flags;
};

typedef struct {
    PyObject_HEAD
    int fd, is_started, is_closing;
    void *buffer; /* `size` bytes, NULL before the thread has started */
    Py_ssize_t size;
    PyObject *give_back;
    pthread_t thread;
    pthread_mutex_t mutex;
    pthread_cond_t has_changed;
    struct job jobs[MOST_JOBS]; /* a ring */
    unsigned int first, count;
} ReplyThread;

/* Waits for a job; returns 0 if there is none and the thread is closing. */
static int next_job(ReplyThread *self, struct job *job) {
    pthread_mutex_lock(&self->mutex);
    while (!self->count && !self->is_closing)
        pthread_cond_wait(&self->has_changed, &self->mutex);
    int is_there = self->count > 0;
    if (is_there) {
        *job = self->jobs[self->first];
        self->first = (self->first + 1) % MOST_JOBS;
        self->count--;
    }
    pthread_mutex_unlock(&self->mutex);
    return is_there;
}

static int reply(ReplyThread *self, const struct job *job) {
    struct fuse_out_header header = {(uint32_t)sizeof header + job->size, 0, job->unique};
    struct iovec parts[] = {{&header, sizeof header}, {self->buffer, job->size}};
    return preadv2(job->fd, &parts[1], 1, job->offset, job->flags) == (ssize_t)job->size &&
           writev(self->fd, parts, 2) >= 0;
}

static void give_back(ReplyThread *self, const struct job *job) {
    PyGILState_STATE state = PyGILState_Ensure();
    PyObject *done = PyObject_CallFunction(self->give_back, "KKLI", job->unique, job->fh,
                                           job->offset, job->size);
    if (done == NULL)
        PyErr_WriteUnraisable(self->give_back);
    Py_XDECREF(done);
    PyGILState_Release(state);
}

static void *work(void *argument) {
    ReplyThread *self = argument;
    struct job job;
    while (next_job(self, &job)) {
        int is_sent = reply(self, &job);
        close(job.fd);
        if (!is_sent)
            give_back(self, &job);
    }
    return NULL;
}

/* Starts the thread; returns 0 if that fails. The thread blocks all signals, which Python's main
 * thread handles. If memory can't be locked, it is at least resident. */
static int start(ReplyThread *self) {
    sigset_t all, before;
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE;
    if (self->buffer == NULL)
        self->buffer = mmap(NULL, (size_t)self->size, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (self->buffer == MAP_FAILED) {
        self->buffer = NULL;
        return 0;
    }
    (void)!mlock(self->buffer, (size_t)self->size);
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    self->is_started = pthread_create(&self->thread, NULL, work, self) == 0;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return self->is_started;
}

static PyObject *send_file(ReplyThread *self, PyObject *arguments) {
    struct job job;
    if (!PyArg_ParseTuple(arguments, "KKiLIi", &job.unique, &job.fh, &job.fd, &job.offset,
                          &job.size, &job.flags))
        return NULL;
    int is_running = !self->is_closing && (self->is_started || start(self));
    if (!is_running || job.size > self->size ||
        (job.fd = fcntl(job.fd, F_DUPFD_CLOEXEC, 0)) < 0)
        Py_RETURN_FALSE;
    pthread_mutex_lock(&self->mutex);
    int has_room = self->count < MOST_JOBS;
    if (has_room) {
        self->jobs[(self->first + self->count++) % MOST_JOBS] = job;
        pthread_cond_signal(&self->has_changed);
    }
    pthread_mutex_unlock(&self->mutex);
    if (!has_room)
        close(job.fd);
    return PyBool_FromLong(has_room);
}

static PyObject *close_thread(ReplyThread *self, PyObject *Py_UNUSED(ignored)) {
    pthread_mutex_lock(&self->mutex);
    int is_running = self->is_started && !self->is_closing;
    self->is_closing = 1;
    pthread_cond_signal(&self->has_changed);
    pthread_mutex_unlock(&self->mutex);
    Py_BEGIN_ALLOW_THREADS;
    if (is_running)
        pthread_join(self->thread, NULL);
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

static PyObject *new_thread(PyTypeObject *type, PyObject *arguments, PyObject *Py_UNUSED(names)) {
    int fd;
    Py_ssize_t size;
    PyObject *give_back;
    if (!PyArg_ParseTuple(arguments, "inO", &fd, &size, &give_back))
        return NULL;
    ReplyThread *self = (ReplyThread *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->fd = fd;
    self->size = size;
    self->give_back = Py_NewRef(give_back);
    pthread_mutex_init(&self->mutex, NULL);
    pthread_cond_init(&self->has_changed, NULL);
    return (PyObject *)self;
}

static void dealloc(ReplyThread *self) {
    PyTypeObject *type = Py_TYPE(self);
    Py_XDECREF(close_thread(self, NULL));
    if (self->buffer != NULL)
        munmap(self->buffer, (size_t)self->size);
    Py_DECREF(self->give_back);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyMethodDef methods[] = {
    {"send", (PyCFunction)send_file, METH_VARARGS, NULL},
    {"close", (PyCFunction)close_thread, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_new, new_thread}, {Py_tp_dealloc, dealloc}, {Py_tp_methods, methods}, {0, NULL}};

static PyType_Spec spec = {
    "fusefs.fuse._replies.ReplyThread", sizeof(ReplyThread), 0, Py_TPFLAGS_DEFAULT, slots};

static int module_exec(PyObject *module) {
    PyObject *type = PyType_FromModuleAndSpec(module, &spec, NULL);
    int is_bad = type == NULL || PyModule_AddObjectRef(module, "ReplyThread", type) < 0;
    Py_XDECREF(type);
    return is_bad ? -1 : 0;
}

static PyModuleDef_Slot module_slots[] = {{Py_mod_exec, module_exec}, {0, NULL}};

static PyModuleDef module = {PyModuleDef_HEAD_INIT, .m_name = "_replies", .m_slots = module_slots};

PyMODINIT_FUNC PyInit__replies(void) {
    return PyModuleDef_Init(&module);
}
