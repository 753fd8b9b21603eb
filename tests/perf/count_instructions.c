/* A plugin of qemu-user that prints the number of executed guest instructions (qemu's plugin interface, version 1). The declarations are
 * those of qemu-plugin.h, which Debian's qemu-user does not install. */
#include <inttypes.h>
#include <stdio.h>

struct qemu_plugin_tb;
extern void qemu_plugin_register_vcpu_tb_trans_cb(uint64_t id, void (*translated)(uint64_t id, struct qemu_plugin_tb *tb));
extern size_t qemu_plugin_tb_n_insns(const struct qemu_plugin_tb *tb);
extern void qemu_plugin_register_vcpu_tb_exec_inline(struct qemu_plugin_tb *tb, int operation, void *to, uint64_t number);
extern void qemu_plugin_register_atexit_cb(uint64_t id, void (*ended)(uint64_t id, void *context), void *context);

enum { ADD_U64 = 0 };
static uint64_t executed;

static void translated(uint64_t id, struct qemu_plugin_tb *tb)
{
    (void)id;
    qemu_plugin_register_vcpu_tb_exec_inline(tb, ADD_U64, &executed, qemu_plugin_tb_n_insns(tb));
}

static void ended(uint64_t id, void *context)
{
    (void)id, (void)context;
    fprintf(stderr, "%" PRIu64 "\n", executed);
}

int qemu_plugin_version = 1;

int qemu_plugin_install(uint64_t id, const void *info, int argc, char **argv)
{
    (void)info, (void)argc, (void)argv;
    qemu_plugin_register_vcpu_tb_trans_cb(id, translated);
    qemu_plugin_register_atexit_cb(id, ended, NULL);
    return 0;
}
