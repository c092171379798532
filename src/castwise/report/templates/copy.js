// Copies the code in a box whose button is pressed.
for (const button of document.querySelectorAll(".copy")) {
  button.addEventListener("click", async () => {
    const code = button.closest(".remedy").querySelector("pre");
    try {
      await navigator.clipboard.writeText(code.textContent);
      button.textContent = "Copied";
    } catch { // the browser may deny a local file this use of the clipboard
      getSelection().selectAllChildren(code);
      button.textContent = document.execCommand("copy") ? "Copied" : "Selected: press Ctrl+C";
    }
  });
}
